"""PTX to C++: registers become typed variables, labels stay labels, an instruction a call of a macro of machine.h.

Bits are held unsigned; `f32` and `f64` registers as float and double. Where an instruction's type and a register's are
not the same kind their bits are. One entry makes one translation unit, with the variables it uses: shared memory is
laid out here, from address BASE on, variables of the source first, what the launch asks for behind them.
"""

from __future__ import annotations

import re
import struct
from collections import ChainMap
from dataclasses import dataclass, field
from functools import cached_property

from ptx.instructions import ATOMICS, COPIES, LDMATRIX, MMA, NOTHING, SHUFFLES, SPECIAL, VALUES, VOTES, memory_access
from ptx.parse import Function, Module, PTXError, Variable, variable

C_TYPES = {"b8": "uint8_t", "b16": "uint16_t", "b32": "uint32_t", "b64": "uint64_t", "f32": "float", "f64": "double"}

#: Where shared memory begins: not at 0, so that an address of the wrong space shows.
BASE = 1024


def storage(kind: str) -> str:
    """Return the register type of a type: b32 for u32 and s32, b16 for f16."""
    return kind if kind in ("f32", "f64", "pred") else f"b{kind[1:]}"


def c_type(kind: str) -> str:
    return "bool" if kind == "pred" else C_TYPES[storage(kind)]


def signed(kind: str) -> str:
    """Return the C++ type of a value with its sign: int32_t for s32."""
    return f"int{kind[1:]}_t" if kind[0] == "s" else c_type(kind)


def immediate(text: str, kind: str) -> str:
    """Return a constant of a type."""
    if match := re.fullmatch(r"0([fd])([0-9A-F]+)", text):
        bits, wide = int(match[2], 16), match[1] == "d"
        if kind != ("f64" if wide else "f32"):
            raise PTXError(f"{text} as {kind}")
        value: float = struct.unpack("<d" if wide else "<f", bits.to_bytes(8 if wide else 4, "little"))[0]
        if value - value == 0:
            return value.hex() + ("" if wide else "f")
        return f"as_f64({bits}ull)" if wide else f"as_f32({bits}u)"
    if not re.fullmatch(r"-?\d+", text):
        raise PTXError(f"not a constant: {text}")
    if kind == "pred":
        return "true" if int(text) else "false"
    if kind[0] == "f":
        raise PTXError(f"{text} as {kind}")
    size = int(kind[1:])
    return f"{int(text) % (1 << size)}{'ull' if size == 64 else 'u'}"


def split_operands(text: str) -> list[str]:
    """Split at commas, but not within braces and parentheses."""
    return [part.strip() for part in re.split(r",(?![^{(]*[})])", text)] if text else []


def vector(text: str) -> list[str]:
    if not (text.startswith("{") and text.endswith("}")):
        raise PTXError(f"not a vector: {text}")
    return [part.strip() for part in text[1:-1].split(",")]


@dataclass
class Translator:
    """Writes one function. used: the variables of the module that it names."""

    module: Module
    function: Function
    registers: ChainMap[str, str] = field(default_factory=lambda: ChainMap({}))
    arrays: dict[str, Variable] = field(default_factory=dict)
    used: dict[str, Variable] = field(default_factory=dict)
    shared: dict[str, int] = field(default_factory=dict)
    callees: set[str] = field(default_factory=set)
    line: int = 0

    @cached_property
    def is_dependent(self) -> bool:
        """Whether the next launch may begin before this one is done: all threads must wait for the one before, then."""
        return any("griddepcontrol.launch_dependents" in s.text for s in self.function.body)

    # ------------------------------------------------------------ operands

    def name(self, register: str) -> str:
        if register not in self.registers:
            raise PTXError(f"unknown register {register}")
        return "_" + register.lstrip("%")

    def kind(self, register: str) -> str:
        """Return a register's type; those of %r<9> are known by their letters."""
        if register in self.registers:
            return self.registers[register]
        raise PTXError(f"unknown register {register}")

    def source(self, text: str, kind: str) -> str:
        """Return an operand's value as its type is held. A register may be wider than the type."""
        if text.startswith("!"):
            if kind != "pred":
                raise PTXError(f"{text}: not of a predicate")
            return f"!{self.source(text[1:], kind)}"
        if text in SPECIAL:
            return SPECIAL[text]
        if not text.startswith("%") and text not in self.registers:
            return self.address_of(text) if re.match(r"[A-Za-z_$]", text) else immediate(text, kind)
        have, want = self.kind(text), storage(kind)
        name = self.name(text)
        if have == want:
            return name
        if "pred" in (have, want):
            raise PTXError(f"{text} ({have}) as {kind}")
        if have[1:] == want[1:]:
            return f"as_{want}({name})"
        if have[0] == "b" and want[0] == "b" and int(have[1:]) > int(want[1:]):
            return f"(({c_type(want)}){name})"
        raise PTXError(f"{text} ({have}) as {kind}")

    def store(self, register: str, value: str, kind: str) -> str:
        """Return the assignment of a value of a type; a wider register takes it with its sign or with zeros."""
        if register == "_":
            return f"(void)({value});"
        have, want = self.kind(register), storage(kind)
        name = self.name(register)
        if have == want:
            return f"{name} = {value};"
        if "pred" not in (have, want) and have[1:] == want[1:]:
            return f"{name} = as_{have}({value});"
        if have[0] == "b" and want[0] == "b" and int(have[1:]) > int(want[1:]):
            return f"{name} = ({signed(kind)})({value});"
        raise PTXError(f"{register} ({have}) = {kind}")

    def address_of(self, name: str) -> str:
        """Return the address of a variable, in its own state space, as 64 bits."""
        if name in self.shared:
            return f"{self.shared[name]}ull"
        if name in self.arrays:
            return f"(uint64_t)V_{name}"
        if name not in self.module.variables:
            raise PTXError(f"unknown variable {name}")
        entry = self.module.variables[name]
        self.used[name] = entry
        if entry.space == "shared":
            raise PTXError(f"{name}: shared memory is laid out before")
        return f"(uint64_t)V_{name}"

    def address(self, text: str) -> str:
        """Return the 64-bit address of [register + offset]."""
        match = re.fullmatch(r"\[([%$\w]+)(?:\+(-?\d+))?\]", text)
        if match is None:
            raise PTXError(f"not an address: {text}")
        base, offset = match[1], int(match[2] or 0)
        if base in self.registers:
            value = self.source(base, "b64" if self.kind(base) == "b64" else "b32")
        else:
            value = self.address_of(base)
        return f"{value} + {offset % 2**64}ull" if offset else value

    # ------------------------------------------------------------ statements

    def statement(self, text: str) -> str:
        """Return the C++ of a statement."""
        if text in ("{", "}"):
            self.registers = self.registers.new_child() if text == "{" else self.registers.parents
            return text
        if text.endswith(":"):
            return f"{text.lstrip('$')};"
        if text.startswith("."):
            return self.declaration(text)
        if guard := re.match(r"@(!?)(%\w+) ", text):
            condition = guard[1] + self.source(guard[2], "pred")
            return f"if ({condition}) {{ {self.instruction(text[guard.end() :])} }}"
        return self.instruction(text)

    def declaration(self, text: str) -> str:
        if re.fullmatch(r'\.pragma "(nounroll|used_bytes_mask \d+)"', text):
            return ""
        if match := re.fullmatch(r"\.reg \.(\w+) (.*)", text):
            kind = storage(match[1])
            names = []
            for name in split_operands(match[2]):
                if several := re.fullmatch(r"(%\w+)<(\d+)>", name):
                    names += [f"{several[1]}{i}" for i in range(int(several[2]))]
                else:
                    names.append(name)
            self.registers.update(dict.fromkeys(names, kind))
            # Those of the function itself are declared where it begins, as far as they are used.
            return "" if len(self.registers.maps) == 1 else self.declare(names)
        declared = variable(text)
        if declared.space == "shared":
            return ""
        if declared.space not in ("local", "param"):
            raise PTXError(f"a variable within a function: {text}")
        self.arrays[declared.name] = declared
        return f"alignas(16) uint8_t V_{declared.name}[{declared.bytes}];"

    def declare(self, names: list[str]) -> str:
        return " ".join(f"{c_type(self.kind(n))} {self.name(n)};" for n in names)

    def instruction(self, text: str) -> str:
        """Return the C++ of an instruction, which can be counted (machine.h)."""
        return f"COUNT({self.line}) {self.operation(text)}"

    def operation(self, text: str) -> str:
        opcode, _, operands_text = text.partition(" ")
        operands = split_operands(operands_text)
        if opcode in VALUES:
            return self.value(opcode, operands)
        if opcode.startswith(("ld.", "st.")):
            return self.memory(opcode, operands)
        if opcode in MMA or opcode in LDMATRIX or opcode in SHUFFLES or opcode in VOTES:
            return self.collective(opcode, operands)
        if opcode in ATOMICS:
            return self.atomic(opcode, operands)
        if opcode.startswith("cp.async"):
            return self.copy(opcode, operands)
        return self.control(opcode, operands)

    def value(self, opcode: str, operands: list[str]) -> str:
        result, *kinds = VALUES[opcode]
        if opcode in ("mov.b32", "mov.b64") and "{" in "".join(operands):
            return self.pack(int(opcode[5:]), *operands)
        if len(operands) != len(kinds) + 1:
            raise PTXError(f"{opcode} with {len(operands)} operands")
        sources = [self.source(o, k) for o, k in zip(operands[1:], kinds, strict=True)]
        if opcode.startswith("mov."):
            return self.store(operands[0], sources[0], result)
        return self.store(operands[0], f"{opcode.replace('.', '_')}({', '.join(sources)})", result)

    def pack(self, bits: int, target: str, value: str) -> str:
        """mov of two halves, the low one first; `_` takes none."""
        half, n_bits = f"b{bits // 2}", bits // 2
        if target.startswith("{"):
            low, high = vector(target)
            source = self.source(value, f"b{bits}")
            lower, upper = (f"({c_type(half)})({part})" for part in (source, f"{source} >> {n_bits}"))
            return f"{{ {self.store(low, lower, half)} {self.store(high, upper, half)} }}"
        low, high = (f"({c_type(f'b{bits}')}){self.source(part, half)}" for part in vector(value))
        return self.store(target, f"({high} << {n_bits} | {low})", f"b{bits}")

    def memory(self, opcode: str, operands: list[str]) -> str:
        access = memory_access(opcode)
        if access is None or len(operands) != 2:
            raise PTXError(f"unknown instruction {opcode}")
        space, count, kind = access
        size = int(kind[1:]) // 8
        load = opcode.startswith("ld.")
        registers, place = operands if load else operands[::-1]
        values = vector(registers) if count > 1 else [registers]
        if len(values) != count:
            raise PTXError(f"{opcode} of {registers}")
        access_code = f"at_{space}_{'ld' if load else 'st'}({self.address(place)}, {size * count}, {self.line})"
        kind = kind if kind[0] == "s" else storage(kind)
        type_ = c_type(kind)
        if load:
            gets = " ".join(self.store(v, f"GET({type_}, q, {i})", kind) for i, v in enumerate(values))
            return f"{{ const uint8_t* q = {access_code}; {gets} }}"
        puts = " ".join(f"PUT({type_}, q, {i}, {self.source(v, kind)});" for i, v in enumerate(values))
        return f"{{ uint8_t* q = {access_code}; {puts} }}"

    def collective(self, opcode: str, operands: list[str]) -> str:
        name = opcode.replace(".", "_")
        if opcode in MMA:
            return self.mma(opcode, operands)
        if opcode in LDMATRIX:
            count = LDMATRIX[opcode]
            registers = vector(operands[0])
            if len(registers) != count:
                raise PTXError(f"{opcode} of {operands[0]}")
            stores = " ".join(self.store(r, f"x[{i}]", "b32") for i, r in enumerate(registers))
            return f"{{ uint32_t x[4]; {name}(x, {self.address(operands[1])}, {self.line}); {stores} }}"
        if opcode in VOTES:
            result, kind = VOTES[opcode]
            arguments = f"{self.source(operands[1], kind)}, {self.source(operands[2], 'b32')}"
            return self.store(operands[0], f"{name}({arguments})", result)
        target, *sources = operands
        lane, in_range = target.split("|") if "|" in target else (target, "_")
        arguments = ", ".join(self.source(s, "b32") for s in sources)
        if len(sources) != 4:
            raise PTXError(f"{opcode} with {len(sources)} sources")
        stores = f"{self.store(lane, 'x', 'b32')} {self.store(in_range, 'there', 'pred')}"
        return f"{{ bool there; const uint32_t x = {name}({arguments}, there); {stores} }}"

    def mma(self, opcode: str, operands: list[str]) -> str:
        registers = [vector(o) for o in operands]
        if tuple(map(len, registers)) != MMA[opcode]:
            raise PTXError(f"{opcode} of {operands}")
        d, *sources = registers
        declarations = " ".join(
            f"const uint32_t {name}[] = {{{', '.join(self.source(r, 'b32') for r in registers_of_source)}}};"
            for name, registers_of_source in zip("abc", sources, strict=True)
        )
        stores = " ".join(self.store(r, f"d[{i}]", "b32") for i, r in enumerate(d))
        return f"{{ {declarations} uint32_t d[4]; {opcode.replace('.', '_')}(d, a, b, c, {self.line}); {stores} }}"

    def atomic(self, opcode: str, operands: list[str]) -> str:
        _, space, operation, kind = opcode.split(".")
        if len(operands) != 2 + ATOMICS[opcode]:
            raise PTXError(f"{opcode} with {len(operands)} operands")
        place = f"at_{space}_st({self.address(operands[1])}, {int(kind[1:]) // 8}, {self.line})"
        values = ", ".join(self.source(o, kind) for o in operands[2:])
        return self.store(operands[0], f"atom_{operation}_{kind}({place}, {values})", kind)

    def copy(self, opcode: str, operands: list[str]) -> str:
        if opcode in COPIES:
            target, source, size = operands
            if int(size) not in COPIES[opcode]:
                raise PTXError(f"{opcode} of {size} bytes")
            return (
                f"host_copy_async(at_shared_st({self.address(target)}, {size}, {self.line}), "
                f"at_global_ld({self.address(source)}, {size}, {self.line}), {size});"
            )
        if opcode == "cp.async.wait_group" and len(operands) == 1:
            return f"host_wait_groups({int(operands[0])});"
        if opcode == "cp.async.commit_group" and not operands:
            return "host_end_group();"
        if opcode == "cp.async.wait_all" and not operands:
            return "host_end_group(); host_wait_groups(0);"
        raise PTXError(f"unknown instruction {opcode}")

    def control(self, opcode: str, operands: list[str]) -> str:
        if opcode in ("bra", "bra.uni") and len(operands) == 1:
            return f"goto {operands[0].lstrip('$')};"
        if opcode == "ret" and not operands:
            return "host_check_waited(); return;" if self.is_dependent else "return;"
        if opcode == "trap" and not operands:
            return f"ptx_trap({self.line});"
        if opcode == "bar.sync" and operands == ["0"]:
            return f"bar_sync({self.line});"
        if opcode == "bar.warp.sync" and len(operands) == 1:
            return f"bar_warp_sync({self.source(operands[0], 'b32')});"
        if opcode == "griddepcontrol.wait" and not operands:
            return "host_wait_for_previous();"
        if opcode in NOTHING and not operands:
            return ""
        if opcode == "call.uni" and len(operands) == 3:
            target, name, parameters = operands
            self.callees.add(name)
            arguments = [f"V_{part}" for o in (target, parameters) for part in split_operands(o.strip("() "))]
            return f"F_{name}({', '.join(arguments)});"
        raise PTXError(f"unknown instruction {opcode} {', '.join(operands)}")

    # ------------------------------------------------------------ the whole

    def lay_out_shared(self) -> int:
        """Give shared variables that the function names their addresses; return the bytes of those with a size."""
        words = set(re.findall(r"[$\w]+", " ".join(s.text for s in self.function.body)))
        declared = [variable(s.text) for s in self.function.body if s.text.startswith(".shared")]
        variables = declared + [v for v in self.module.variables.values() if v.space == "shared"]
        offset = 0
        for v in sorted((v for v in variables if v.name in words), key=lambda v: v.count == 0):
            align = max(v.align, 16 if v.count == 0 else 1)
            offset = -(-offset // align) * align
            self.shared[v.name] = BASE + offset
            offset += v.bytes
        return offset

    def body(self) -> str:
        """Return the C++ of the body."""
        for v in self.function.parameters + self.function.returned:
            self.arrays[v.name] = v
        lines = []
        for s in self.function.body:
            self.line = s.line
            try:
                lines.append(self.statement(s.text))
            except (PTXError, KeyError, ValueError) as e:
                raise PTXError(f"{self.function.name}, line {s.line}: {s.text[:160]}: {e}") from e
        text = "\n".join(line for line in lines if line)
        words = set(re.findall(r"\b_\w+", text))
        names = [n for n in self.registers if "_" + n.lstrip("%") in words]
        return f"{self.declare(names)}\n{text}\n"


def translate(module: Module, name: str) -> str:
    """Return the translation unit of an entry: ``name(parameters)``, and how much shared memory it declares.

    Raises:
        PTXError: an instruction or a directive that is not known.
    """
    main = Translator(module, module.functions[name])
    shared = main.lay_out_shared()
    (parameters,) = main.function.parameters
    body = f'extern "C" void {name}(uint8_t* V_{parameters.name}) {{\n{main.body()}}}\n'
    used, functions, threads = dict(main.used), "", main.function.threads
    for callee in sorted(main.callees):
        translator = Translator(module, module.functions[callee])
        v = [*translator.function.returned, *translator.function.parameters]
        functions += (
            f"static void F_{callee}({', '.join(f'uint8_t* V_{p.name}' for p in v)}) {{\n{translator.body()}}}\n"
        )
        used |= translator.used
        if translator.callees or translator.shared:
            raise PTXError(f"{callee} calls others")
    return "\n".join(
        [
            '#include "machine.h"',
            f'extern "C" {{ extern const unsigned shared_bytes = {shared}, threads_at_most = {threads}; }}',
            *map(define, used.values()),
            functions + body,
        ]
    )


def define(v: Variable) -> str:
    """Return the definition of a variable of global or constant memory."""
    values = ", ".join(immediate(x, v.type) for x in v.values)
    return f"alignas({max(16, v.align)}) static {c_type(v.type)} V_{v.name}[{v.count}] = {{{values}}};"
