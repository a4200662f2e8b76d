"""Options of the programs of llama.cpp and ik_llama.cpp that have no counterpart here.

``IgnoredOption`` options change no result: they are accepted with one note, so that existing command lines run.
``RefusedOption`` options would change the result, or do another job: each ends the command with what to type instead.
Where a command has an option of the same name, that counts (``GroupedCommand``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import click

from quantkit.cli._options import GroupedOption, NoEffect

F = TypeVar("F", bound=Callable[..., Any])

#: The value of a switch, which may be omitted.
_SWITCH = r"on|off|auto|0|1|0,1"

#: Options without effect, by reason; | joins synonyms, and = marks options with a value. From
#: common/arg.cpp and tools/llama-bench of llama.cpp b11434, common/common.cpp and examples/llama-bench of ik_llama.cpp.
_IGNORED: tuple[tuple[str, str], ...] = (
    (
        "there is no log to configure",
        "-v|--verbose|--log-verbose -lv|--verbosity|--log-verbosity= --log-disable --log-file= --log-colors= "
        "--log-prefix --no-log-prefix --log-timestamps --no-log-timestamps --log-jsonl --no-log-jsonl --log-format= "
        "-ld|--logdir= --minilog --verbose-prompt --no-display-prompt -ptc|--print-token-count= -co|--color "
        "--simple-io --perf --no-perf -dkvc|--dump-kv-cache -oe|--output-err= --print-overrides",
    ),
    (
        "kernels are compiled before anything is measured",
        "--warmup --no-warmup -w= -wb|--warmup-batch",
    ),
    (
        "the system's scheduler places threads: use numactl or taskset",
        "--numa= --prio= --prio-batch= --poll= --poll-batch= -C|--cpu-mask= -Cr|--cpu-range= --cpu-strict= "
        "-Cb|--cpu-mask-batch= -Crb|--cpu-range-batch= --cpu-strict-batch= --delay=",
    ),
    (
        "-t is the number of threads for prompts as well",
        "-tb|--threads-batch= -tgb|--threads-gen-batch= -td|--threads-draft= -tbd|--threads-batch-draft=",
    ),
    (
        "attention is always computed in blocks of keys, as flash attention does",
        "-fa|--flash-attn -no-fa|--no-flash-attn",
    ),
    ("the model's metadata decide which form of latent attention runs", "-mla|--mla-use|--mla-attn="),
    ("attention never stores a whole matrix of scores", "-amb|--attention-max-batch|--attn-max-batch="),
    (
        "weights are used as stored in the file",
        "-rtr|--run-time-repack --repack -nr|--no-repack -thp|--transparent-huge-pages -vq|--validate-quants "
        "--check-tensors -mqkv|--merge-qkv",
    ),
    (
        "weights are never locked in memory; --no-mmap copies them there, --max-ram limits their memory",
        "--mlock -lm|--load-mode= -lzm|--lazy-mode= -dio|--direct-io -ndio|--no-direct-io --no-host "
        "--lora-init-without-apply",
    ),
    (
        "the engine schedules its own graph",
        "-ger|--grouped-expert-routing -no-ger|--no-grouped-expert-routing -gr|--graph-reuse -no-gr|--no-graph-reuse "
        "-rcache|--rope-cache -no-mmad|--no-fused-mul-multiadd -fdn|--fused-delta-net= -sas|--scheduler-async "
        "-smgs|--split-mode-graph-scheduling -smf16|--split-mode-f16 -smf32|--split-mode-f32 -grt|--graph-reduce-type= "
        "-wgt|--worst-graph-tokens= -mea|--max-extra-alloc= -bs|--backend-sampling",
    ),
    (
        "data move between devices only at the borders that -ngl and -ot set",
        "-cuda|--cuda-params= -op|--offload-policy= -no-ooae|--no-offload-only-active-experts -kvo|--kv-offload "
        "-nkvo|--no-kv-offload --op-offload -nopo|-no-op-offload|--no-op-offload --max-gpu= -mmdev=",
    ),
    (
        "-b and -c decide how many sequences run at once",
        "-np|--parallel= -ns|--sequences= -ps|--p-split= -kvu|--kv-unified -no-kvu|--no-kv-unified -cb|--cont-batching "
        "-nocb|--no-cont-batching -dt|--defrag-thold= -pps -tgs --embeddings|-embd",
    ),
    (
        "every chunk begins with an empty cache that holds all of it",
        "--swa-full --context-shift --no-context-shift --keep= -cram|--cache-ram= --ctx-checkpoints= "
        "--ctx-checkpoints-interval= "
        "--ctx-checkpoints-tolerance=",
    ),
    ("keys are cached as they are", "-khad|--k-cache-hadamard -vhad|--v-cache-hadamard"),
    (
        "-ngl, -ot and --max-vram alone decide the placement",
        "-fit|--fit -fitt|--fit-target= -fitc|--fit-ctx= --fit-margin=",
    ),
    (
        "texts are used as they are, without a template; imatrix --chat applies the model's",
        "--jinja --no-jinja --chat-template= --chat-template-file= --chat-template-kwargs= --reasoning-format= "
        "--reasoning-budget= --no-prefill-assistant --no-escape -sp|--special",
    ),
    ("no result depends on a seed", "-s|--seed="),
    (
        "nothing is generated or sampled",
        "-n|--predict|--n-predict= --samplers= --sampler-seq|--sampling-seq= --ignore-eos "
        "--temp|--temperature= --top-k= --top-p= --min-p= --tfs= --top-nsigma|--top-n-sigma= --xtc-probability= "
        "--xtc-threshold= --typical|--typical-p= --repeat-last-n= --repeat-penalty= --presence-penalty= "
        "--frequency-penalty= --penalize-nl --dry-multiplier= --dry-base= --dry-allowed-length= --dry-penalty-last-n= "
        "--dry-sequence-breaker= --adaptive-target= --adaptive-decay= --adaptive-updt-w-cur --dynatemp-range= "
        "--dynatemp-exp= --mirostat= --mirostat-lr= --mirostat-ent= -l|--logit-bias= --grammar= --grammar-file= "
        "--json-schema= -jf|--json-schema-file= --cfg-negative-prompt= --cfg-negative-prompt-file= --cfg-scale= "
        "--perplexity|--all-logits -r|--reverse-prompt= -i|--interactive -cnv|--conversation -no-cnv",
    ),
    (
        "nothing is drafted",
        "-md|--model-draft|--spec-draft-model= -ngld|--gpu-layers-draft|--n-gpu-layers-draft= -devd|--device-draft= "
        "-cd|--ctx-size-draft= -ctkd|--cache-type-k-draft|--spec-draft-type-k= "
        "-ctvd|--cache-type-v-draft|--spec-draft-type-v= --draft|--draft-max|--draft-n= --draft-min|--draft-n-min= "
        "--draft-p-min= -draft|--draft-params= --spec-type= -mtp|--multi-token-prediction "
        "-no-mtp|--no-multi-token-prediction",
    ),
    (
        "only text is read",
        "--mmproj-offload --no-mmproj-offload --image-min-tokens= --image-max-tokens= --mtmd-kq-type= --video-fps= "
        "--video-timestamp-interval= --video-ffmpeg-dir=",
    ),
    ("only -hf downloads, and only a file that is not there yet", "--offline"),
    ("the output matrix is output.weight, or the token embeddings", "--output-tensor-name="),
)

_TASKS = "tasks (HellaSwag, WinoGrande, multiple choice) are scored by quantkit score -m FILE -f TASKS"
_ROPE = "set the model's key instead: --override-kv ARCH.rope.{key}=float:{value}"
_LORA = "adapters are not applied; merge one first: quantkit quantize IN.gguf OUT.gguf TYPE --merge-lora ADAPTER.gguf"

#: Options that would change the result, by what to type instead; written like ``_IGNORED``.
_REFUSED: tuple[tuple[str, str], ...] = (
    (
        _TASKS,
        "--hellaswag --hellaswag-tasks= --winogrande --winogrande-tasks= --multiple-choice --multiple-choice-tasks=",
    ),
    (f"{_TASKS}; texts are given with -f, token ids with --tokens @FILE.i32", "-bf|--binary-file="),
    ("escape sequences are not processed: put the line break itself into the text", "-e|--escape"),
    (_ROPE.format(key="freq_base", value="N"), "--rope-freq-base="),
    (_ROPE.format(key="scaling.factor", value="N (1 / N of --rope-freq-scale)"), "--rope-scale= --rope-freq-scale="),
    (
        "set the model's key instead: --override-kv ARCH.rope.scaling.type=str:yarn, and the keys of "
        "ARCH.rope.scaling.* that belong to it",
        "--rope-scaling= --yarn-orig-ctx= --yarn-ext-factor= --yarn-attn-factor= --yarn-beta-slow= --yarn-beta-fast= "
        "-gan|--grp-attn-n= -gaw|--grp-attn-w=",
    ),
    ("use fewer experts by --override-kv ARCH.expert_used_count=int:N", "-ser|--smart-expert-reduction="),
    (_LORA, "--lora= --lora-scaled="),
    (
        "control vectors are not applied; omit it, or use llama-perplexity",
        "--control-vector= --control-vector-scaled= --control-vector-layer-range=",
    ),
    (
        "all layers have caches of one type: give it with -ctk and -ctv",
        "-ctk-first|--cache-type-k-first= -ctk-last|--cache-type-k-last= -ctv-first|--cache-type-v-first= "
        "-ctv-last|--cache-type-v-last=",
    ),
    ("name the tensors: -ot 'blk\\.(0|1|..)\\.ffn_(gate|up|down)\\.=CPU'", "-ncffn|--n-cpu-ffn="),
    ("several machines run as a Ray cluster: --ray HOST:PORT", "--rpc|-rpc="),
    ("download the file first, then give it with -m: curl -LO URL", "-mu|--model-url="),
    ("get the file from the registry first, then give it with -m", "-dr|--docker-repo="),
    ("set HF_TOKEN in the environment", "-hft|--hf-token="),
    ("quantkit doctor lists the devices of this machine", "--list-devices"),
    ("vision and audio encoders are not run: omit it", "-mm|--mmproj= -mmu|--mmproj-url= --image= --audio="),
    (
        "-npp, -ntg and -npl are options of llama-batched-bench: use -p, -n and -d of quantkit bench",
        "-npp= -ntg= -npl=",
    ),
    ("a layer of an embedding model is not evaluated: omit it", "--pooling= --attention="),
    (
        "a mixture of mean and context is not available; measure one context size at a time: -c N",
        "--context-file= --chunk-size= --chunk-separator=",
    ),
    ("`hf cache ls` of huggingface_hub lists downloads", "-cl|--cache-list"),
    ("type _QUANTKIT_COMPLETE=bash_source quantkit", "--completion-bash"),
)


def _parse(table: tuple[tuple[str, str], ...]) -> Iterator[tuple[tuple[str, ...], bool, str]]:
    """Yield the names of each option of a table, whether it has a value, and its text."""
    for text, options in table:
        for option in options.split():
            yield tuple(option.rstrip("=").split("|")), option.endswith("="), text


class IgnoredOption(GroupedOption):
    """An option that is accepted and ignored."""

    def __init__(self, *args: Any, note: str, **kwargs: Any) -> None:
        super().__init__(*args, hidden=True, expose_value=False, callback=self._add_note, **kwargs)
        self.note = note

    def _add_note(self, ctx: click.Context, param: click.Parameter, value: object) -> None:
        if value is not None and value is not False:
            NoEffect.from_context(ctx).add(self, self.note)


class RefusedOption(GroupedOption):
    """An option that ends the command with what to type instead."""

    def __init__(self, *args: Any, reason: str, **kwargs: Any) -> None:
        super().__init__(*args, hidden=True, expose_value=False, is_eager=True, callback=self._refuse, **kwargs)
        self.reason = reason

    def _refuse(self, ctx: click.Context, param: click.Parameter, value: object) -> None:
        if value is not None and value is not False:
            raise click.UsageError(f"{NoEffect.from_context(ctx).name(self)}: {self.reason}", ctx)


def _identifier(names: tuple[str, ...]) -> str:
    """Return a parameter name that no option of a command has."""
    return f"compat_{names[0].strip('-').replace('-', '_')}"


def ignored_options(function: F) -> F:
    """Declare the options of llama.cpp's and ik_llama.cpp's programs that have no effect when a model runs."""
    for names, has_value, note in _parse(_IGNORED):
        value: dict[str, Any] = {} if has_value else {"is_flag": False, "flag_value": "1", "values": _SWITCH}
        function = click.option(*names, _identifier(names), cls=IgnoredOption, note=note, **value)(function)
    return refuse_options(_REFUSED)(function)


def refuse_options(table: tuple[tuple[str, str], ...]) -> Callable[[F], F]:
    """Declare the options of a table as refused."""

    def declare(function: F) -> F:
        for names, has_value, reason in _parse(table):
            function = click.option(
                *names, _identifier(names), cls=RefusedOption, reason=reason, is_flag=not has_value
            )(function)
        return function

    return declare


#: Options of llama-quantize and its kin, and of convert_lora_to_gguf.py, that are refused.
QUANTIZE_REFUSED: tuple[tuple[str, str], ...] = (
    (
        "the types for a size are found by a search: quantkit cook IN.gguf 4.5bpw -f TEXT, or quantkit sensitivity, "
        "then quantkit search --target-bpw N",
        "--target-bpw=",
    ),
    (
        "the types for a size are found by a search: quantkit cook IN.gguf 12G -f TEXT, or quantkit sensitivity, then "
        "quantkit search --target-size SIZE",
        "--target-size=",
    ),
)
LORA_REFUSED: tuple[tuple[str, str], ...] = (
    (
        "the base is a directory here: `hf download ID config.json --local-dir DIR`, then --base DIR",
        "--base-model-id=",
    ),
)
