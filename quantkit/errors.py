"""Errors shown to users, and the exit codes of a command that ends with them.

::

    QuantkitError            1   an error the user can act on: problem, place and remedy
    ├── FormatError          1   a file is damaged or not of the expected format
    ├── TypeNotSupported     1   no such type, or no encoder or decoder for it
    ├── RecipeError          2   a rule, preset or option that cannot be applied
    │   └── ArgumentError    2   an unknown argument of a function, or one of the wrong type; also a TypeError
    ├── ResourceError        1   disk, memory, an optional package or a device is missing
    │   └── ClusterError     1   no node of a cluster can continue; finished work is kept
    └── QualityGate          3   the result does not meet a required quality

click.UsageError keeps exit code 2. Any other exception that escapes is a bug. The command line (cli/) prints these;
the library itself does not need click.
"""

from __future__ import annotations

import errno
from typing import NamedTuple, Self

__all__ = [
    "CODES",
    "ArgumentError",
    "ClusterError",
    "ErrorCode",
    "FormatError",
    "QualityGate",
    "QuantkitError",
    "RecipeError",
    "ResourceError",
    "TypeNotSupported",
]


class ErrorCode(NamedTuple):
    """Cause and remedy of the errors with one code."""

    cause: str
    remedy: str


# fmt: off
#: All codes. They are stable: a code that is no longer used stays reserved. docs/reference/errors.md is their page.
CODES = {
    # Damaged or unexpected files.
    "QK-E100": ErrorCode("A file is damaged or not of the expected format.", "Download or produce the file again."),
    "QK-E101": ErrorCode("A file is not GGUF, or a checkpoint directory was expected.", "Check the path."),
    "QK-E102": ErrorCode("The header of a GGUF file is damaged or exceeds a limit.", "Download the file again."),
    "QK-E103": ErrorCode("A file is shorter than its header says.", "Complete the download."),
    "QK-E104": ErrorCode("A shard is missing, or shards are not of one model.", "Put all shards into one directory."),
    "QK-E105": ErrorCode("Tensors that the architecture needs are missing.", "Complete the model, or use --allow-incomplete."),
    "QK-E106": ErrorCode(
        "The shape or type of a tensor does not match the metadata.", "Correct config.json or the metadata."),
    "QK-E107": ErrorCode(
        "A tensor name is unknown to the architecture, or occurs twice.", "Remove or rename the tensor."),
    "QK-E108": ErrorCode("A value is infinite or NaN.", "Convert or download the source again."),
    "QK-E109": ErrorCode(
        "A source changed while it was being read, or since an interrupted run.", "Run again when no other program writes to it."),
    "QK-E110": ErrorCode("A safetensors or PyTorch file is damaged.", "Download the file again."),
    "QK-E111": ErrorCode(
        "A JSON, YAML or TOML file cannot be parsed, or its top level is of the wrong kind.", "Correct the file."),
    "QK-E112": ErrorCode("A key of config.json is missing or has a value of the wrong type.", "Correct config.json."),
    "QK-E113": ErrorCode("Scales of a quantized checkpoint are missing or do not fit their weights.", "Complete the checkpoint."),
    "QK-E114": ErrorCode("Tokenizer files are damaged or contradict each other.", "Use the tokenizer of the original model."),
    "QK-E115": ErrorCode(
        "A pre-tokenizer is not recognized, or its token ids differ from those of the checkpoint's tokenizer.", "Give --pre NAME."),
    "QK-E116": ErrorCode(
        "A chat template or tokenizer fails, or exceeds its limit of time, memory or depth.", "Correct the template or tokenizer."),
    "QK-E117": ErrorCode("A LoRA adapter is damaged or of an unsupported kind.", "Merge the adapter with PEFT first."),
    "QK-E118": ErrorCode("An importance matrix or covariance file is damaged or holds invalid values.", "Compute it again."),
    "QK-E119": ErrorCode(
        "An importance matrix or covariance file belongs to another model.", "Compute it with this model."),
    "QK-E120": ErrorCode("A path is not a regular file, or the file is too large for its kind.", "Check the path."),
    "QK-E121": ErrorCode("A text file is not UTF-8, or contains no text.", "Convert the file to UTF-8."),
    "QK-E122": ErrorCode(
        "A file written by quantkit (journal, snapshot, sensitivities, report) is damaged.", "Create it again."),
    "QK-E123": ErrorCode("A value of GGUF metadata is missing or of the wrong type.", "Correct it with --override-kv."),
    # An option, a rule or an argument cannot be followed.
    "QK-E200": ErrorCode("An option or a rule cannot be applied.", "See the message."),
    "QK-E201": ErrorCode("Options are mutually exclusive.", "Omit one of them."),
    "QK-E202": ErrorCode("An option requires another one.", "Give both."),
    "QK-E203": ErrorCode("A value is out of range, or not a valid choice.", "Use a value that the message lists."),
    "QK-E204": ErrorCode("A recipe or a rule is malformed.", "Write REGEX=TYPE."),
    "QK-E205": ErrorCode("A regular expression is invalid, too large or too slow.", "Simplify it."),
    "QK-E206": ErrorCode("A pattern, class or group matches nothing.", "Compare with the names in `quantkit inspect`."),
    "QK-E207": ErrorCode("Files that must match belong to different models.", "Use files of the same model."),
    "QK-E208": ErrorCode(
        "cook.toml or another settings file has an unknown key, or a value of the wrong type.", "See `quantkit cook init`."),
    "QK-E209": ErrorCode("The source is already quantized.", "Use the unquantized model, or --allow-requantize."),
    "QK-E210": ErrorCode("A Python argument is unknown or of the wrong type.", "See the function's docstring."),
    "QK-E211": ErrorCode("Experts cannot be merged, split or pruned as requested.", "Omit the option, or correct the rules."),
    "QK-E212": ErrorCode("A type needs an importance matrix.", "Give --imatrix FILE."),
    "QK-E213": ErrorCode("A target (size, bits per weight, divergence, speed) cannot be reached.", "Relax the target or allow more types."),
    "QK-E214": ErrorCode("There is nothing to do.", "See the message."),
    "QK-E215": ErrorCode(
        "A draft model is converted without its target, or a target is given for another model.", "Give --target-model-dir DIR, or omit it."),
    "QK-E216": ErrorCode(
        "A model that is an adapter is converted without its base, or a base is given for another model.", "Give --base DIR, or omit it."),
    "QK-E217": ErrorCode(
        "No file has a tensor in the type that a recipe gives it.", "Give a file with this type, or change the recipe."),
    # This version cannot do it.
    "QK-E300": ErrorCode("Not supported by this version.", "See the message."),
    "QK-E301": ErrorCode("A tensor type or preset does not exist.", "See `quantkit types`."),
    "QK-E302": ErrorCode("A type has no encoder or decoder in quantkit.", "See `quantkit types`."),
    "QK-E303": ErrorCode(
        "The row length is not a multiple of the type's block size.", "Choose a type with smaller blocks."),
    "QK-E304": ErrorCode("A model class or architecture is not supported.", "See `quantkit convert --list` and `quantkit export --list`."),
    "QK-E305": ErrorCode("A setting or tensor of the model cannot be represented in the output.", "See the message."),
    "QK-E306": ErrorCode("The engine cannot run this file.", "See the message."),
    # Disk, memory, packages, devices.
    "QK-E400": ErrorCode("A resource is missing.", "See the message."),
    "QK-E401": ErrorCode("A file or directory does not exist.", "Check the path."),
    "QK-E402": ErrorCode("An output already exists.", "Use --overwrite, or choose another name."),
    "QK-E403": ErrorCode("An output is also an input, or two outputs are the same file.", "Choose another output."),
    "QK-E404": ErrorCode("Another process is writing the output.", "Wait for it, or choose another output."),
    "QK-E405": ErrorCode("A file cannot be read or written.", "Check permissions and the disk."),
    "QK-E406": ErrorCode("There is not enough disk space.", "Free some space, or write elsewhere."),
    "QK-E407": ErrorCode("There is not enough memory.", "Raise --max-ram, or choose a smaller context."),
    "QK-E408": ErrorCode("An earlier run was interrupted.", "Use --resume, or --overwrite to start over."),
    "QK-E409": ErrorCode(
        "The saved state belongs to a run with other inputs or options.", "Use --overwrite to start over."),
    "QK-E410": ErrorCode("An optional package is missing.", "Install the extra that the message names."),
    "QK-E411": ErrorCode("There is no usable GPU.", "Use --backend cpu, or check the driver."),
    "QK-E412": ErrorCode("An object store or URL cannot be used.", "Check the address and credentials."),
    "QK-E413": ErrorCode("A child process ended without a result.", "See the message."),
    "QK-E450": ErrorCode("No node of the cluster can continue.", "Check the nodes; finished work is kept."),
    # The result misses a quality.
    "QK-E500": ErrorCode("The result exists but does not meet the required quality.", "See the message."),
}
#: All codes of warnings, on rules and options with an unexpected effect. As stable as those of errors.
WARNINGS = {
    "QK-W001": ErrorCode("A rule matches no tensor.", "Compare it with the names in `quantkit inspect`."),
    "QK-W002": ErrorCode("A rule has no effect: other rules take precedence for all its tensors.", "Put the exception first, or remove the rule."),
    "QK-W003": ErrorCode("A rule for output.weight also matches attn_output.weight.", r"Write `^output\.weight$`."),
    "QK-W004": ErrorCode("A rule matches only the up or only the gate half of merged experts, and is ignored.", "Write ffn_(up|gate)_exps, or a rule for ffn_gate_up_exps."),
    "QK-W005": ErrorCode("llama-quantize lower-cases patterns, which changes classes such as `\\S`.", "Write the class as a set, if both programs read the rule."),
    "QK-W006": ErrorCode("A rule has no effect: an option takes precedence, or the tensors are never quantized.", "Remove the rule or the option."),
    "QK-W007": ErrorCode("An option for a tensor type has no effect.", "Remove it; the message says why."),
    "QK-W008": ErrorCode("NVFP4 is written without the per-tensor scale of NVIDIA's checkpoints.", "Convert such a checkpoint with `quantkit convert`, or choose MXFP4 or Q4_K."),
    "QK-W010": ErrorCode("llama-quantize would ignore the rules with this TYPE, or with --pure; quantkit applies them.", "Nothing, unless both programs must write the same file."),
    "QK-W011": ErrorCode("No runtime supports all types of the file.", "Choose types of llama.cpp or of ik_llama.cpp only."),
    "QK-W012": ErrorCode("--ffn-gate-type and --ffn-up-type differ, but the experts are merged.", "Give both the same type."),
    "QK-W013": ErrorCode("Rules give the up and gate halves of merged experts different types, and are ignored.", "Give both halves one type, or write a rule for ffn_gate_up_exps."),
    "QK-W014": ErrorCode("Rules for up and gate experts apply to merged experts; llama-quantize would skip these.", "Nothing, unless both programs must write the same file."),
    "QK-W015": ErrorCode("--ffn-up-type or --ffn-gate-type alone applies to both halves of merged experts.", "Nothing, or give both options."),
    "QK-W016": ErrorCode("ik_llama.cpp would ignore a class option with this TYPE; quantkit applies it.", "Nothing, unless both programs must write the same file."),
    "QK-W020": ErrorCode("The runtime, or every runtime, lacks a type.", "Choose a type that `quantkit types` lists for the runtime."),
    "QK-W021": ErrorCode("The row length is not a multiple of the type's block size: another type replaces it.", "Choose a type with smaller blocks, such as IQ4_NL or Q8_0."),
    "QK-W022": ErrorCode("A type needs an importance matrix.", "Give --imatrix FILE."),
    "QK-W023": ErrorCode("A rule matches only tensors that are never quantized, such as norms.", "Remove the rule."),
    "QK-W024": ErrorCode("The layer number of a rule also matches longer numbers: blk.1 matches blk.10.", r"End the number with `\.`."),
    "QK-W025": ErrorCode("An unescaped dot in a rule matches more than a dot.", r"Write `\.`."),
    "QK-W026": ErrorCode("A rule occurs twice.", "Remove one."),
    "QK-W028": ErrorCode("The program of the recipe's dialect cannot read the rule.", "Rewrite it, or convert the recipe with `quantkit recipe convert`."),
}
# fmt: on

_OS_ERROR_CODES = {
    errno.ENOENT: "QK-E401",
    errno.ENOTDIR: "QK-E401",
    errno.ENOSPC: "QK-E406",
    errno.EDQUOT: "QK-E406",
    errno.ENOMEM: "QK-E407",
}


class QuantkitError(Exception):
    """Base class of all errors shown without a traceback.

    ``exit_code`` is that of the command. ``code`` is one of ``CODES`` and identifies errors independently of their
    wording; each class has a default.
    """

    exit_code = 1
    default_code = "QK-E400"

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code

    def extend(self, text: str) -> Self:
        """Return the same error with text appended to its message."""
        return type(self)(self.message + text, self.code)


def os_error_code(error: OSError) -> str:
    """Return the code of an error of the operating system: no such file, no space, or another."""
    return _OS_ERROR_CODES.get(error.errno or 0, "QK-E405")


class FormatError(QuantkitError):
    """A file is damaged, hostile or not of the expected format."""

    default_code = "QK-E100"


class TypeNotSupported(QuantkitError):
    """A tensor type is unknown, or cannot be encoded or decoded."""

    default_code = "QK-E300"


class RecipeError(QuantkitError):
    """A rule, preset or combination of options cannot be applied."""

    exit_code = 2
    default_code = "QK-E200"


class ArgumentError(RecipeError, TypeError):
    """An argument of a function or its options is unknown or of the wrong type."""

    default_code = "QK-E210"


class ResourceError(QuantkitError):
    """Disk space, memory, an optional package or a device is missing."""

    default_code = "QK-E400"


class ClusterError(ResourceError):
    """No node of the cluster is left or usable; finished tensors are kept."""

    default_code = "QK-E450"


class QualityGate(QuantkitError):
    """The work is done, but its result does not meet a required quality."""

    exit_code = 3
    default_code = "QK-E500"
