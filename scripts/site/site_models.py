"""The page of supported models: which class and architecture is converted, run, and exported."""

from __future__ import annotations

from quantkit.convert import architectures, encoder_classes
from quantkit.export import exported_classes
from quantkit.model.arch import ARCHS

_HEAD = """\
# Supported models

`quantkit quantize`, `inspect`, `compare` and `merge-up-gate` work on GGUF files of every architecture, also
of unknown ones. Two steps depend on the model:

* **convert** reads the {n_classes} classes of transformers below; `config.json` names the class under `architectures`.
  `quantkit convert --list` prints them.
* **engine**: quantkit itself runs {n_run} architectures, for `imatrix`, `perplexity`, `kld`, `logits`, `sensitivity`,
  `--calibrate`, `report` and `bench`. For others take an importance matrix of llama-imatrix.

**convert --mmproj** writes the vision and audio encoders of {n_encoders} classes, with the projectors at the
[end of the page](#vision-and-audio-encoders).

**export** writes files of {n_exported} architectures as {n_export_classes} classes (`quantkit export --list`).

| architecture in GGUF | engine | export | classes that convert reads |
|---|---|---|---|
"""


_ENCODERS = """
## Vision and audio encoders

`quantkit convert --mmproj` writes an mmproj file of these classes.

| class | projectors |
|---|---|
"""


def models_page() -> str:
    """Return the page: a row for each architecture."""
    # Some classes have a second row under the name of their module.
    converted = {name.rpartition(".")[2]: architecture for name, architecture in architectures().items()}
    classes: dict[str, list[str]] = {}
    for name, architecture in converted.items():
        classes.setdefault(architecture, []).append(f"`{name}`")
    exported, encoders = exported_classes(), encoder_classes()
    head = _HEAD.format(
        n_classes=len(converted),
        n_encoders=len(encoders),
        n_run=len(ARCHS),
        n_exported=len(exported),
        n_export_classes=sum(map(len, exported.values())),
    )
    rows = [
        f"| `{name}` | {'yes' if name in ARCHS else ''} | {'yes' if name in exported else ''} "
        f"| {', '.join(classes.get(name, ['-']))} |"
        for name in sorted({*classes, *ARCHS, *exported})
    ]
    projectors = [f"| `{name}` | {', '.join(f'`{p}`' for p in types)} |" for name, types in encoders.items()]
    return head + "\n".join(rows) + "\n" + _ENCODERS + "\n".join(projectors) + "\n"
