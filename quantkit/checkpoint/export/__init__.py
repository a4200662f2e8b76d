"""Export: a GGUF file as the checkpoint of Hugging Face that it may come from.

``source.open_export`` reads a GGUF file's header and returns an ``ExportSource``: a source of the pipeline whose
tensors have the names and shapes of a checkpoint, made while they are read, with config.json and the files of the
tokenizer. It inverts the rules of the same rows as conversion (``models``), then converts what it made once more:
names, shapes and keys that would come back otherwise are an error, not a model that is slightly different.

* ``gguf_metadata``: access to a file's metadata. ``classes``: which model class a file is exported as.
* ``tensor_values``: a tensor of a file as values.
* ``config``, ``config_values``, ``llama3_rope``: metadata to config.json; ``biases``: its switches for them.
* ``tokenizer``: the vocabulary, ``vocabularies`` those of single families, with ``tokens`` and
  ``pre_tokenizers``. ``card``: the file's own metadata as README.md. ``comparison``: keys that would not come back.
"""
