"""What rows of architectures.py cannot say: functions and rules that they name, a file for each family of models."""
