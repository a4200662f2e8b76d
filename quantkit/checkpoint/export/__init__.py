"""Export: a GGUF file as the Hugging Face checkpoint that it may come from.

``source.open_export`` reads a GGUF file's header and returns an ``ExportSource``: a source of the pipeline whose
tensors have the names and shapes of a checkpoint and are computed while being read, with config.json and the files of
the tokenizer. It inverts the rules of the same rows as conversion (``models``), then converts the result back: names,
shapes and keys that differ are an error, so that no slightly different model results.

* ``gguf_metadata``: access to a file's metadata. ``classes``: the model class for export.
* ``tensor_values``: a tensor of a file as values.
* ``config``, ``config_values``, ``llama3_rope``: metadata to config.json; ``biases``: its switches for biases.
* ``tokenizer``: the vocabulary, ``vocabularies`` those of specific families, with ``tokens`` and
  ``pre_tokenizers``. ``card``: the file's own metadata as README.md. ``comparison``: keys that would not be restored.
"""
