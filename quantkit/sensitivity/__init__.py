"""How much each tensor matters: divergence that quantizing a group of tensors alone causes."""
