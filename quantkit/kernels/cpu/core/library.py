"""Compiles each entry point to one object that exports only the entry.

Plain numba optimizes every function with all its callees, generates machine code and Python wrappers, and repeats that
for each caller; and an entry point's object defines its callees as weak symbols, of which the linker keeps one per
name, although objects cached by two processes may define different code under one name. Here a helper stays LLVM IR
(``HelperCompiler``); an entry point (``EntryCompiler``) links each helper once, as internal, and is optimized once.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any

import llvmlite.binding as llvm
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler, CompileResult

from quantkit.kernels.first_run import compilation

#: Names that numba looks up: an entry point's C and Python wrappers, and its environment.
_FOUND_BY_NAME = ("cfunc.", "_ZN7cpython", "_ZN08NumbaEnv")


class _Helper(JITCodeLibrary):
    """The IR of one function, only cleaned, not turned into machine code."""

    _shared_module: Any

    def finalize(self) -> None:
        self._finalized = True

    def _get_module_for_linking(self) -> Any:
        """Return the IR with its dependencies, for functions that plain numba compiles."""
        if self._shared_module is None:
            self._shared_module = self._final_module.clone()
            _link(self, self._shared_module)
            for value in _definitions(self._shared_module):
                value.linkage = llvm.Linkage.linkonce_odr
        return self._shared_module


class _Entry(_Helper):
    """An entry point: its own IR and one copy of each dependency, optimized together."""

    def finalize(self) -> None:
        exported = {value.name for value in _definitions(self._final_module) if value.name.startswith(_FOUND_BY_NAME)}
        _link(self, self._final_module)
        for value in _definitions(self._final_module):
            if value.name not in exported:
                value.linkage = llvm.Linkage.internal
        passes, builder = self._codegen._module_pass_manager()
        passes.run(self._final_module, builder)
        self._final_module.verify()
        self._finalize_final_module()
        self._finalized = True


def _definitions(module: Any) -> Iterator[Any]:
    """Yield the functions and variables that a module defines."""
    for values in (module.functions, module.global_variables):
        yield from (value for value in values if not value.is_declaration)


def _link(library: Any, module: Any) -> None:
    """Link a library's direct and indirect dependencies into a module, each once."""
    linked, queue = {library}, list(library._linking_libraries)
    while queue:
        dependency = queue.pop()
        if dependency not in linked:
            linked.add(dependency)
            helper = isinstance(dependency, _Helper)
            queue += dependency._linking_libraries if helper else ()
            module.link_in(dependency._final_module if helper else dependency._get_module_for_linking(), preserve=True)


#: Passes for features that kernels do not use (closures, literal_unroll, raise, with, ...); each takes ms per function.
_NOT_NEEDED = {
    "WithLifting",
    "InlineClosureLikes",
    "RewriteDynamicRaises",
    "MakeFunctionToJitFunction",
    "InlineInlinables",
    "FindLiterallyCalls",
    "LiteralUnroll",
    "LiteralPropagationSubPipelinePass",
    "InlineOverloads",
    "NopythonRewrites",
    "AnnotateTypes",
    "DumpParforDiagnostics",
}


class EntryCompiler(Compiler):
    """Compiles functions that Python or the tape calls."""

    library: type[JITCodeLibrary] = _Entry

    def define_pipelines(self) -> list[Any]:
        (manager,) = super().define_pipelines()
        manager.passes = [(one, why) for one, why in manager.passes if one.__name__ not in _NOT_NEEDED]
        return [manager]

    def compile_extra(self, function: Callable[..., Any]) -> CompileResult:
        self.state.library = self.library(self.state.targetctx.codegen(), function.__qualname__)
        self.state.library.enable_object_caching()
        with compilation():
            return super().compile_extra(function)


class HelperCompiler(EntryCompiler):
    """Compiles functions that only compiled functions call."""

    library = _Helper

    def compile_extra(self, function: Callable[..., Any]) -> CompileResult:
        flags = self.state.flags
        flags.no_cpython_wrapper = flags.no_cfunc_wrapper = flags.no_compile = True
        result = super().compile_extra(function)
        refusal = _refuse(function.__qualname__)
        next(refusal)
        # The key under which callers look up the function, and the object that Python would call: numba requires a
        # builtin.
        result = result._replace(entry_point=refusal.send)
        self.state.targetctx.insert_user_function(result.entry_point, result.fndesc, [result.library])
        return result


def _refuse(name: str) -> Generator[None, Any, None]:
    yield
    raise TypeError(f"{name} is a helper of kernels: Python cannot call it")
