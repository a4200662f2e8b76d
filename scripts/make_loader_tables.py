#!/usr/bin/env python3
"""Write quantkit/loaders/*.table: the keys, tensors and shapes that each runtime's loader requires, by architecture.

    pip install tree-sitter tree-sitter-cpp
    scripts/make_loader_tables.py llama.cpp /path/to/llama.cpp > quantkit/loaders/llama_cpp.table
    scripts/make_loader_tables.py ik_llama.cpp /path/to/ik_llama.cpp > quantkit/loaders/ik_llama_cpp.table

A loader is executed symbolically: names, shapes and conditions become expressions over hyperparameters, one row for
each key and each kind of tensor. A statement that is not understood is printed, and its architecture is skipped.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Set
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

import tree_sitter
import tree_sitter_cpp

CPP = tree_sitter.Language(tree_sitter_cpp.language())
PARSER = tree_sitter.Parser(CPP)

Node = Any

#: Tensors without an operation count as loaded and are never created.
SUFFIXES = ("weight", "bias", "scale")

#: Functions of hyperparameters with a layer as argument, by default the first.
BY_LAYER = frozenset(
    {
        *("n_head", "n_head_kv", "n_ff", "n_ff_exp", "n_expert_used", "n_embd_head_k", "n_embd_head_v", "n_rot"),
        *("n_embd_k_gqa", "n_embd_v_gqa", "n_gqa"),
    }
)
#: Calls whose effect is neither a key nor a tensor.
IGNORED_CALLS = re.compile(
    r"^(LLAMA_LOG|GGML_UNUSED|printf|LLAMA_LOAD_LOCALS|LOADING_PRELUDE|ss <<|(model\.|head_)?layers\.resize)"
)


#: Fields without an effect on keys and tensors.
IGNORED_TARGETS = re.compile(r"adapter_token|ctx_|layers\[|msa_p|hparams\.llm_ffn_op|sep$|use_mmap_buffer|layer\.\w+->")

#: Calls without which a loop or a switch has no rows.
RELEVANT = r"item = |create_tensor|get_key|throw|GGML_A|hparams\.\w+ *=[^=]|\.set\("


class NotUnderstood(Exception):
    """A statement that cannot be translated to a row."""


def children(node: Node) -> list[Node]:
    """Return the named children that are not comments."""
    return [c for c in node.named_children if c.type != "comment"]


def text(node: Node) -> str:
    return " ".join(node.text.decode().split())


def conjunction(*conditions: str) -> str:
    return " and ".join(f"({c})" for c in conditions if c != "True") or "True"


@dataclass
class Flags:
    """The conditions under which a tensor is optional, and under which only its number of values is checked."""

    optional: str = "False"
    reshape: str = "False"
    skip: str = "False"

    def __or__(self, other: Flags) -> Flags:
        return Flags(*(f"({a}) or ({b})" for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __and__(self, other: Flags) -> str:
        both = (f"({a}) and ({b})" for a, b in zip(astuple(self), astuple(other), strict=True))
        return simplify(" or ".join(f"({condition})" for condition in both))

    def where(self, condition: str, flags: Flags) -> Flags:
        pairs = zip(astuple(self), astuple(flags), strict=True)
        return Flags(*(f"({a}) if ({condition}) else ({b})" for a, b in pairs))


FLAGS = {
    "TENSOR_NOT_REQUIRED": Flags(optional="True"),
    "TENSOR_ALLOW_RESHAPE": Flags(reshape="True"),
    "TENSOR_SKIP": Flags(skip="True"),
    **dict.fromkeys(("TENSOR_DUPLICATED", "TENSOR_SKIP_IF_VIRTUAL", "TENSOR_READ_LAZY"), Flags()),
}


@dataclass
class Name:
    """A tensor's name: a template, with loop variables in braces."""

    template: str

    @property
    def has(self) -> str:
        return f"has(f'{self.template}')" if "{" in self.template else f"has('{self.template}')"


@dataclass
class Function:
    """A lambda or a method, executed where it is called."""

    parameters: list[str]
    body: Node
    scope: dict[str, Any]
    defaults: dict[str, Node] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """A line of a table."""

    body: str
    when: str = "True"
    loops: tuple[str, ...] = ()

    @property
    def target(self) -> str:
        """The name that the row sets, if it has no other effect."""
        match = re.match(r"(?:set|let) (\w+)(\[.*?\])? = ", self.body)
        return match[1] if match else ""

    @property
    def names(self) -> set[str]:
        """The names used by its expressions."""
        body = re.sub(r"^(set|let) \w+", "", self.body) if self.target else self.body
        return set(re.findall(r"[A-Za-z_]\w*", f"{body} {self.when} {' '.join(self.loops)}"))

    def __str__(self) -> str:
        return self.body + ("" if self.when == "True" else f" when {self.when}")


class Simplify(ast.NodeTransformer):
    """Fold constants in conditions."""

    def folded(self, node: ast.expr) -> ast.expr:
        expression: ast.expr = self.visit(node)
        return expression

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        absorbing = isinstance(node.op, ast.Or)
        values: list[ast.expr] = []
        for value in (self.visit(v) for v in node.values):
            if isinstance(value, ast.Constant) and isinstance(value.value, bool):
                if value.value is absorbing:
                    return value
                continue
            if isinstance(value, ast.BoolOp) and type(value.op) is type(node.op):
                values += [v for v in value.values if ast.dump(v) not in map(ast.dump, values)]
            elif ast.dump(value) not in map(ast.dump, values):
                values.append(value)
        if not values:
            return ast.Constant(not absorbing)
        return values[0] if len(values) == 1 else ast.BoolOp(node.op, values)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        operand = self.visit(node.operand)
        if isinstance(node.op, ast.Not):
            if isinstance(operand, ast.Constant):
                return ast.Constant(not operand.value)
            if isinstance(operand, ast.UnaryOp) and isinstance(operand.op, ast.Not):
                return operand.operand
        return ast.UnaryOp(node.op, operand)

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        test, body, orelse = (self.folded(part) for part in (node.test, node.body, node.orelse))
        if isinstance(test, ast.Constant):
            return body if test.value else orelse
        if ast.dump(body) == ast.dump(orelse):
            return body
        if ast.unparse(body) == "True" and ast.unparse(orelse) == "False":
            return test
        if ast.unparse(body) == "False" and ast.unparse(orelse) == "True":
            return self.folded(ast.UnaryOp(ast.Not(), test))
        return ast.IfExp(test, body, orelse)

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        if ast.unparse(node) in ("i < 0", "il < 0"):  # layers count from 0
            return ast.Constant(False)
        if "SPLIT_MODE_" in ast.unparse(node):
            return ast.Constant(ast.unparse(node) == "SPLIT_MODE_LAYER == SPLIT_MODE_LAYER")
        node = ast.Compare(self.visit(node.left), node.ops, [self.visit(c) for c in node.comparators])
        try:
            value = eval(compile(ast.fix_missing_locations(ast.Expression(node)), "", "eval"), {"__builtins__": {}})
        except NameError:
            return node
        return ast.Constant(value)


def simplify(expression: str) -> str:
    tree = ast.parse(expression, mode="eval")
    return ast.unparse(ast.fix_missing_locations(Simplify().visit(tree)))


class Follower:
    """Executes a loader's functions symbolically and collects rows."""

    def __init__(self, source: Source, arch: str) -> None:
        self.source, self.arch = source, arch
        self.rows: list[Row] = []
        self.conditions: list[str] = []
        self.loops: list[str] = []
        self.variables = 0

    # Rows

    def add(self, body: str) -> None:
        when = simplify(conjunction(*self.conditions))
        if when != "False":
            self.rows.append(Row(body, when, tuple(self.loops)))

    def add_key(self, target: str, key: str, kind: str, required: str) -> str:
        """Enter a key that is read into a field; return an expression for whether the file has it."""
        mark = {"True": "", "False": " optional"}.get(simplify(required))
        if mark is None:
            raise NotUnderstood(f"a key required by condition: {key}")
        self.add(f"key {target} = {key}: {kind}{mark}")
        return f"known('{key}')"

    def add_tensor(self, name: Name, dims: list[str], flags: Flags) -> None:
        if name.template == "__missing__":
            self.conditions.append(f"not ({flags.optional})")
            self.add("fail")
            self.conditions.pop()
            return
        optional, reshape = simplify(flags.optional), simplify(flags.reshape)
        shape = ", ".join(simplify(d) for d in dims)
        mark = "" if optional == "False" else " optional" if optional == "True" else f" optional {optional}"
        self.add(f"{name.template}: [{shape}]" + (" reshape" if reshape == "True" else "") + mark)

    # Expressions

    def expression(self, node: Node, scope: dict[str, Any]) -> Any:
        """Return an expression's value: a Python expression, Flags, a Name or a Function."""
        kind = node.type
        if kind in ("parenthesized_expression", "condition_clause"):
            inner = children(node)
            if len(inner) == 2:
                self.statement(inner[0], scope)
            if inner[-1].type == "declaration":
                return self.expression(
                    inner[-1].child_by_field_name("value"), scope | self.name_scope(inner[-1], scope)
                )
            return self.expression(inner[-1], scope)
        method = getattr(self, f"_{kind}", None)
        if method is None:
            raise NotUnderstood(f"{kind}: {text(node)}")
        return method(node, scope)

    def name_scope(self, declaration: Node, scope: dict[str, Any]) -> dict[str, Any]:
        """Enter the variable of a condition and return it."""
        name = re.sub(r"[&*\s]", "", text(declaration.child_by_field_name("declarator")))
        scope[name] = self.expression(declaration.child_by_field_name("value"), scope)
        return {name: scope[name]}

    def value(self, node: Node, scope: dict[str, Any]) -> str:
        value = self.expression(node, scope)
        if isinstance(value, Name):
            return value.has
        if isinstance(value, Flags):
            return " or ".join(f"({condition})" for condition in astuple(value))
        if not isinstance(value, str):
            raise NotUnderstood(f"not a value: {text(node)}")
        return value

    def _number_literal(self, node: Node, scope: dict[str, Any]) -> str:
        return re.sub(r"(?<=[\d.])([uUlL]+|f)$", "", text(node))

    def _assignment_expression(self, node: Node, scope: dict[str, Any]) -> str:
        self.assign(node, scope)
        return "None"

    def _true(self, node: Node, scope: dict[str, Any]) -> str:
        return "True"

    def _false(self, node: Node, scope: dict[str, Any]) -> str:
        return "False"

    def _null(self, node: Node, scope: dict[str, Any]) -> str:
        return "None"

    def _string_literal(self, node: Node, scope: dict[str, Any]) -> str:
        return repr(ast.literal_eval(text(node)))

    def _concatenated_string(self, node: Node, scope: dict[str, Any]) -> str:
        return repr("".join(ast.literal_eval(text(c)) for c in children(node)))

    def _identifier(self, node: Node, scope: dict[str, Any]) -> Any:
        name = text(node)
        if "ctx" in name and name != "n_ctx_train":
            return "False"  # the device of a tensor
        if name in scope:
            return scope[name]
        if name in FLAGS:
            return FLAGS[name]
        if name.startswith("LLM_ARCH_") and not self.arch:
            return repr(self.source.archs[name])
        if name.startswith(("LLM_TENSOR_", "LLM_KV_", "LLM_ARCH_", "GGML_TYPE_")):
            return repr(name)
        if name.startswith(("LLAMA_", "LLM_")):
            return self.source.constant(name)
        if name == "arch":
            return repr(self.source.arch_enum(self.arch)) if self.arch else "arch"
        if name == "adapter_token_to_substitute":
            return "_substitute_ids"
        if name in self.source.by_layer:
            return f"{name}(0)"
        return name

    def _qualified_identifier(self, node: Node, scope: dict[str, Any]) -> Any:
        name = text(node).split("::")[-1]
        if name in FLAGS:
            return FLAGS[name]
        return self.source.constant(name)

    def _field_expression(self, node: Node, scope: dict[str, Any]) -> Any:
        expression = text(node)
        if expression in scope:
            return scope[expression]
        expression = expression.removeprefix("model.")
        if expression.startswith(("hparams.", "this->hparams.")):
            return expression.split("hparams.")[1].replace(".", "_")
        if expression in ("ml.load_mtp", "ml->load_mtp", "mtp", "ml.merge_qkv", "ml.merge_up_gate_exps"):
            return "False"  # options that are off by default
        if expression == "split_mode":
            return "SPLIT_MODE_LAYER"
        if expression.endswith("->type"):
            return "0"
        if expression == "type":
            return "model_type"
        if expression.startswith("layer."):
            return "False"  # never created on this path
        if expression == "arch":
            return repr(self.source.arch_enum(self.arch)) if self.arch else "arch"
        raise NotUnderstood(f"field: {expression}")

    def _subscript_expression(self, node: Node, scope: dict[str, Any]) -> Any:
        array = node.child_by_field_name("argument")
        index = node.child_by_field_name("indices")
        index_value = self.value(children(index)[0], scope)
        if re.match(r".*->ne$", text(array)):
            holder = children(array)[0]
            name = self.expression(children(holder)[0] if text(holder).endswith("->tensor") else holder, scope)
            return f"ne({name.has[4:-1]}, {index_value})"
        if text(array) in scope and isinstance(scope[text(array)], list):
            return scope[text(array)][int(index_value)]
        return f"{self.value(array, scope)}[{index_value}]"

    def _cast_expression(self, node: Node, scope: dict[str, Any]) -> Any:
        return self.expression(node.child_by_field_name("value"), scope)

    def _unary_expression(self, node: Node, scope: dict[str, Any]) -> str:
        operand = self.value(node.child_by_field_name("argument"), scope)
        operator = text(node.child_by_field_name("operator"))
        return f"(not {operand})" if operator == "!" else f"({operator}{operand})"

    def _pointer_expression(self, node: Node, scope: dict[str, Any]) -> Any:
        return self.expression(node.child_by_field_name("argument"), scope)

    def _binary_expression(self, node: Node, scope: dict[str, Any]) -> Any:
        left = self.expression(node.child_by_field_name("left"), scope)
        operator = text(node.child_by_field_name("operator"))
        if operator == "&&" and node.child_by_field_name("right").type == "string_literal":
            return left
        if operator in ("&&", "||") and isinstance(left, str):
            stop = simplify(left) == ("False" if operator == "&&" else "True")
            if stop:
                return simplify(left)
            # The second operand is evaluated only under the first operand's condition.
            self.conditions.append(left if operator == "&&" else f"not ({left})")
        try:
            right = self.expression(node.child_by_field_name("right"), scope)
        finally:
            if operator in ("&&", "||") and isinstance(left, str):
                self.conditions.pop()
        if isinstance(left, Flags) or isinstance(right, Flags):
            left = Flags() if left == "0" else left
            right = Flags() if right == "0" else right
            if operator in ("==", "!="):
                return str(operator == "==")  # only with options that are off
            return left & right if operator == "&" else left | right
        left = left.has if isinstance(left, Name) else left
        right = right.has if isinstance(right, Name) else right
        if right == "None" and operator in ("==", "!="):
            return f"(not {left})" if operator == "==" else left
        operator = {"&&": "and", "||": "or", "/": "//"}.get(operator, operator)
        if operator == "//" and re.search(r"\bsqrt\(|\d\.\d", left + right):
            operator = "/"
        return f"({left} {operator} {right})"

    def _conditional_expression(self, node: Node, scope: dict[str, Any]) -> Any:
        condition = self.value(node.child_by_field_name("condition"), scope)
        value_of_condition = simplify(condition)
        if value_of_condition in ("True", "False"):
            return self.expression(
                node.child_by_field_name("consequence" if value_of_condition == "True" else "alternative"), scope
            )
        self.conditions.append(condition)
        first = self.expression(node.child_by_field_name("consequence"), scope)
        self.conditions[-1] = f"not ({condition})"
        second = self.expression(node.child_by_field_name("alternative"), scope)
        self.conditions.pop()
        if isinstance(first, Flags) or isinstance(second, Flags):
            first, second = (Flags() if f == "0" else f for f in (first, second))
            return first.where(condition, second)
        if isinstance(first, Name):
            return first
        return f"({first} if {condition} else {second})"

    def _lambda_expression(self, node: Node, scope: dict[str, Any]) -> Function:
        parameters, defaults = self.parameters(node.child_by_field_name("declarator"))
        return Function(parameters, node.child_by_field_name("body"), scope, defaults)

    def parameters(self, declarator: Node) -> tuple[list[str], dict[str, Node]]:
        """Return the names of a function's parameters, and the defaults."""
        names, defaults = [], {}
        parameter_list = declarator.child_by_field_name("parameters") or next(
            c for c in children(declarator) if c.type == "parameter_list"
        )
        for parameter in children(parameter_list):
            inner = parameter.child_by_field_name("declarator")
            name = re.sub(r"[&*\s]", "", text(inner)) if inner is not None else ""
            names.append(name)
            if parameter.type == "optional_parameter_declaration":
                defaults[name] = parameter.child_by_field_name("default_value")
        return names, defaults

    def _call_expression(self, node: Node, scope: dict[str, Any]) -> Any:
        callee = node.child_by_field_name("function")
        callee_text = text(callee)
        arguments = children(node.child_by_field_name("arguments"))
        short = callee_text.removeprefix("model.").removeprefix("this->")
        if callee_text in scope and isinstance(scope[callee_text], Function):
            return self.call(scope[callee_text], arguments, scope)
        if short in ("create_tensor",):
            return self.create_tensor(arguments, scope)
        if short == "ml.create_tensor_as_view":
            return self.create_view(arguments, scope)
        if short.startswith(("ggml_", "snprintf", "ctx_map.", "ctx_for_layer")):
            return "None"
        if short == "format":
            return self.format(arguments, scope)
        if short.startswith("LLM_TN("):
            return self.tensor_name(arguments, scope)
        if short.startswith("LLM_KV("):
            return self.expression(arguments[0], scope)
        if short == "ml.llm_kv":
            return self.expression(arguments[0], scope)
        if short == "tn":
            return self.tensor_name(arguments, scope)
        if re.match(r"ml(\.|->)(get|require)_(?!arch)", short):
            return self.read_key(re.split(r"\.|->", short)[1], arguments, scope)
        if short.startswith("hparams."):
            return self.hyperparameter(short.removeprefix("hparams."), arguments, scope)
        if match := re.match(r"std::(max|min)(<.*>)?$", short):
            return f"{match[1]}({', '.join(self.value(a, scope) for a in arguments)})"
        if short.endswith((".str", ".c_str")):
            return self.expression(children(callee)[0], scope)
        if short.startswith("static_cast"):
            return self.expression(arguments[0], scope)
        if short == "std::to_string":
            return "{" + self.value(arguments[0], scope) + "}"
        if short in ("std::sqrt", "sqrtf", "float", "powf", "uint32_t", "int64_t", "int", "uint64_t"):
            return f"{short.split('::')[-1]}({', '.join(self.value(a, scope) for a in arguments)})"
        if short == "head_layers.size":
            return "(n_layer_routing + n_layer_joint)"
        if short.endswith(".size"):
            return f"len({self.value(children(callee)[0], scope)})"
        if short.endswith((".empty", ".has_value")):
            return f"(not {self.value(children(callee)[0], scope)})"
        if short == "vocab.n_tokens":
            return "n_vocab"
        if short == "vocab.n_token_types":
            return "n_token_types"
        if short == "arch_name":
            return repr(self.arch)
        if short == "llm_arch_is_recurrent":
            return "is_recurrent"
        if short == "llama_rope_scaling_type_from_string":
            return f"rope_scaling_type({self.value(arguments[0], scope)})"
        if short == "ml.get_arch":
            return "arch"
        if short == "ml.get_arch_name":
            return "''"
        helper = self.source.helper(short)
        if helper is not None:
            return self.call(helper, arguments, scope)
        raise NotUnderstood(f"call: {text(node)}")

    def hyperparameter(self, name: str, arguments: list[Node], scope: dict[str, Any]) -> str:
        values = [self.value(a, scope) for a in arguments]
        if name in ("set_swa_pattern", "set_recr_pattern"):
            name_of = "is_swa_impl" if name == "set_swa_pattern" else "is_recr_impl"
            self.add(f"set {name_of} = pattern({', '.join(values)})")
            return "None"
        if name == "n_layer":
            return name
        if name in self.source.by_layer or name.startswith("is_") or name in ("has_kv", "has_rope"):
            if name in ("is_mla", "is_swa_any"):
                return f"{name}()"
            return f"{name}({values[0] if values else '0'})"
        return f"{name}({', '.join(values)})"

    def tensor_name(self, arguments: list[Node], scope: dict[str, Any]) -> Name:
        expressions = [self.expression(a, scope) for a in arguments]
        tensor = ast.literal_eval(expressions[0])
        pattern = self.source.tensor_name(tensor, self.arch)
        if pattern is None:
            return Name("__missing__")
        suffix = ""
        if len(expressions) > 1 and expressions[1].startswith("'"):
            suffix = "." + ast.literal_eval(expressions[1])
            numbers = expressions[2:]
        else:
            numbers = expressions[1:]
        numbers = [n for n in numbers if n != "(-1)"]
        for number in numbers:
            pattern = pattern.replace("%d", number if number.isdigit() else "{" + simplify(number) + "}", 1)
        return Name(pattern + suffix)

    def format(self, arguments: list[Node], scope: dict[str, Any]) -> Name | str:
        """Return a formatted name of a tensor, or of a key."""
        pattern = ast.literal_eval(text(arguments[0]))
        for argument in arguments[1:]:
            value = self.value(argument, scope)
            pattern = re.sub(r"%[sud]", "" if value == "''" else "{" + simplify(value) + "}", pattern, count=1)
        return repr(pattern) if pattern.startswith(".") else Name(pattern)

    def create_view(self, arguments: list[Node], scope: dict[str, Any]) -> Name:
        """Enter a tensor that is loaded into part of another."""
        name: Name = self.expression(arguments[2], scope)
        optional = len(arguments) > 5 and self.value(arguments[5], scope) == "False"
        self.add_tensor(name, [self.value(d, scope) for d in children(arguments[3])], Flags(optional=str(optional)))
        return name

    def create_tensor(self, arguments: list[Node], scope: dict[str, Any]) -> Name:
        arguments = arguments[self.source.leading :]
        name_expression = self.expression(arguments[0], scope)
        name: Name = Name(ast.literal_eval(name_expression)) if isinstance(name_expression, str) else name_expression
        dimensions = children(arguments[1])
        dims = [self.value(d, scope) for d in dimensions]
        flags = self.expression(arguments[2], scope) if len(arguments) > 2 else Flags()
        self.add_tensor(name, dims, Flags() if not isinstance(flags, Flags) else flags)
        return name

    # Keys

    def read_key(self, method: str, arguments: list[Node], scope: dict[str, Any]) -> Any:
        if method in ("get_weight", "get_tensor_meta", "require_tensor_meta"):
            name = self.expression(arguments[0], scope)
            return name if isinstance(name, Name) else Name(name_template(name))
        first = self.expression(arguments[0], scope)
        key = ast.literal_eval(first)
        key = self.source.key_name(key) if key.startswith("LLM_KV_") else key
        target_text = text(arguments[1])
        target, kind = self.key_target(target_text, scope)
        kind, _, form = kind.partition(" ")
        values = [self.value(a, scope) for a in arguments[2:]]
        if method == "get_key_or_arr":
            if len(values) == 0 or (len(values) == 1 and values[0] in ("True", "False")):
                return self.add_key(target, key, f"{kind} scalar", values[0] if values else "True")
            count = simplify(values[0])
            return self.add_key(target, key, f"{kind}[{count}]", boolean(values[1]) if len(values) > 1 else "True")
        required = boolean(values[0]) if values else "True"
        if method == "get_arr":
            return self.add_key(target, key, f"{kind} {form or 'array'}", required)
        if method == "get_arr_n":
            return self.add_key(target, key, "length", required)
        return self.add_key(target, key, kind, required)

    def key_target(self, target: str, scope: dict[str, Any]) -> tuple[str, str]:
        """Return the field that a key is read into, and its kind."""
        target = target.removeprefix("model.")
        if target.startswith("hparams."):
            name = target.removeprefix("hparams.")
            return name.replace(".", "_"), self.source.field_kind(name)
        if f"type {target}" in scope:
            before = scope.get(target)
            if isinstance(before, str) and before != f"_{target}":
                self.add(f"let _{target} = {simplify(before)}")
            elif before is None or not isinstance(before, str):
                self.add(f"let _{target} = []")
            scope[target] = f"_{target}"
            return f"_{target}", scope[f"type {target}"]
        return target, self.source.member_kind(target)

    # Statements

    def block(self, nodes: list[Node], scope: dict[str, Any]) -> str:
        """Execute statements; return the condition under which their end is not reached."""
        added, left = 0, "False"
        for node in nodes:
            is_left = self.statement(node, scope)
            if is_left != "False":
                self.conditions.append(f"not ({is_left})")
                left = simplify(f"({left}) or ({is_left})")
                added += 1
                if simplify(is_left) == "True":
                    break
        for _ in range(added):
            self.conditions.pop()
        return left

    def statement(self, node: Node, scope: dict[str, Any]) -> str:
        """Execute a statement; return the condition under which it returns or continues."""
        kind = node.type
        if kind == "compound_statement":
            return self.block(children(node), scope)
        if kind == "declaration":
            self.declare(node, scope)
        elif kind == "expression_statement":
            inner = children(node)
            if inner:
                self.effect(inner[0], scope)
        elif kind == "if_statement":
            return self.branch(node, scope)
        elif kind == "for_statement":
            self.loop(node, scope)
        elif kind in ("return_statement", "continue_statement"):
            return "True"
        elif kind == "throw_statement":
            self.add("fail")
        elif kind == "switch_statement":
            if re.search(RELEVANT, node.text.decode()):
                self.switch(node, scope)
        elif kind == "for_range_loop":
            if re.search(RELEVANT, node.text.decode()):
                self.range_loop(node, scope)
        elif kind == "try_statement":
            self.attempt(node, scope)
        elif kind == "init_statement":
            self.statement(children(node)[0], scope)
        elif kind in ("using_declaration", "alias_declaration", "type_definition", "break_statement", ";"):
            pass
        else:
            raise NotUnderstood(f"{kind}: {text(node)[:120]}")
        return "False"

    def declare(self, node: Node, scope: dict[str, Any]) -> None:
        type_text = text(node.child_by_field_name("type"))
        for declarator in node.children_by_field_name("declarator"):
            if declarator.type != "init_declarator":
                name = re.sub(r"[&*\s]", "", text(declarator))
                scope[f"type {name}"] = self.source.kind_of(type_text)
                if name == "unique_deepstack_idxs":
                    scope[name] = "distinct(deepstack_mapping_arr)"
                if type_text in ("uint32_t", "int", "int64_t", "float", "bool", "int32_t"):
                    scope[name] = "0"
                elif type_text.startswith("std::") and name not in scope:
                    scope[name] = "''" if type_text == "std::string" else "[]"
                continue
            target, value = declarator.child_by_field_name("declarator"), declarator.child_by_field_name("value")
            name = re.sub(r"[&*\s]|^const", "", text(target))
            if value.type == "initializer_list":
                scope[name] = "[]"
                scope[f"type {name}"] = self.source.kind_of(type_text)
                continue
            if re.match(r"(model\.)?(layers|head_layers)\[", text(value)) or text(value) == "layer.switch_lora":
                scope[name] = "None"
                for key in [k for k in scope if k.startswith(name + ".")]:
                    del scope[key]
                continue
            if name in ("tn", "kv", "hparams", "graph_or_attn") or "ctx" in name:
                continue
            scope[f"type {name}"] = self.source.kind_of(type_text)
            if value.type == "argument_list":
                value = children(value)[0]
            result = self.expression(value, scope)
            if isinstance(result, str) and result == "0" and re.search(r"flag", name):
                result = Flags()
            scope[name] = result
            if isinstance(result, str) and len(result) > 12 and not self.conditions and not self.loops:
                self.bind(name, result, scope)

    def bind(self, name: str, value: str, scope: dict[str, Any]) -> None:
        """Bind a value that many rows use to a name."""
        if (
            name not in self.source.by_layer
            and name not in self.source.fields
            and "{" not in value.replace("has(f'", "")
        ):
            self.add(f"let {name} = {simplify(value)}")
            scope[name] = name

    def effect(self, node: Node, scope: dict[str, Any]) -> None:
        statement_text = text(node)
        if IGNORED_CALLS.match(statement_text):
            return
        if node.type == "assignment_expression":
            self.assign(node, scope)
        elif node.type == "call_expression":
            self.effect_call(node, scope)
        elif node.type == "binary_expression" and "get_key" in statement_text:
            self.expression(node, scope)
        elif node.type == "identifier" and statement_text in ("LLAMA_LOAD_LOCALS", "LOADING_PRELUDE"):
            pass
        elif node.type in ("update_expression",):
            raise NotUnderstood(f"update: {statement_text}")
        else:
            raise NotUnderstood(f"effect {node.type}: {statement_text[:120]}")

    def effect_call(self, node: Node, scope: dict[str, Any]) -> None:
        callee = text(node.child_by_field_name("function"))
        arguments = children(node.child_by_field_name("arguments"))
        if callee == "GGML_ASSERT":
            holds = self.value(arguments[0], scope)
            self.conditions.append(f"not ({holds})")
            self.add("fail")
            self.conditions.pop()
        elif callee == "GGML_ABORT":
            self.add("fail")
        elif callee == "std::fill":
            name = text(arguments[0]).removeprefix("hparams.").split(".")[0]
            self.add(f"set {name} = filled({self.value(arguments[2], scope)})")
        elif callee == "std::copy_n":
            source, target = (text(arguments[index]).removeprefix("hparams.").split(".")[0] for index in (0, 2))
            self.add(f"set {target} = {scope.get(source, source)}")
        elif re.search(r"_impl\.(set|reset)$", callee):
            name = callee.split(".")[1]
            if callee.endswith(".reset"):
                self.add(f"set {name} = filled(False)")
            else:
                self.add(f"set {name}[{self.value(arguments[0], scope)}] = True")
        elif callee == "load_swa_pattern":
            period, dense_first = self.value(arguments[1], scope), "False"
            if len(arguments) > 2:
                dense_first = self.value(arguments[2], scope)
            self.add(f"swa_pattern {period}, {dense_first}")
        elif not re.search(r"\.(insert|clear|push_back|reserve|emplace)$", callee):
            self.expression(node, scope)

    def assign(self, node: Node, scope: dict[str, Any]) -> None:
        left, operator = node.child_by_field_name("left"), text(node.child_by_field_name("operator"))
        right, target = node.child_by_field_name("right"), text(node.child_by_field_name("left"))
        if target in ("type", "model.type") or IGNORED_TARGETS.match(target.removeprefix("model.")):
            if re.search(r"\b(create|merge)_", text(right)):
                self.expression(right, scope)
            return
        result = self.expression(right, scope) if right.type != "lambda_expression" else None
        field = target.removeprefix("model.")
        if field.startswith("hparams.") or re.match(r"^hparams", field):
            self.assign_field(left, field.removeprefix("hparams."), operator, result, scope)
        elif isinstance(result, Name):
            old = scope.get(target)
            scope[target] = result if old in (None, "None", "0") or not isinstance(old, Name) else old
        elif operator == "|=":
            before = scope.get(target)
            scope[target] = (before if isinstance(before, Flags) else Flags()) | (result or Flags())
        elif isinstance(result, str) and (scope.get(target) == target or self.is_member(target, scope)):
            self.add(f"set {target} = {simplify(result)}")
        elif isinstance(result, Flags) or result is not None:
            scope[target] = result if operator == "=" else f"({scope[target]} {operator[0]} {result})"

    def is_member(self, target: str, scope: dict[str, Any]) -> bool:
        """Return whether a variable is a member of the model."""
        return target in self.source.members and f"type {target}" not in scope and target not in scope

    def assign_field(self, left: Node, name: str, operator: str, result: Any, scope: dict[str, Any]) -> None:
        if left.type == "subscript_expression":
            array, index = left.child_by_field_name("argument"), left.child_by_field_name("indices")
            index_value = self.value(children(index)[0], scope)
            name = f"{text(array).split('hparams.')[-1]}[{simplify(index_value)}]"
        name = name.replace(".", "_") if "[" not in name else name
        if operator != "=":
            result = f"{name} {operator[:-1]} {result}"
        self.add(f"set {name} = {simplify(result)}")

    def branch(self, node: Node, scope: dict[str, Any]) -> str:
        condition = self.expression(node.child_by_field_name("condition"), scope)
        condition = condition.has if isinstance(condition, Name) else condition
        condition = simplify(condition)
        consequence, alternative = node.child_by_field_name("consequence"), node.child_by_field_name("alternative")
        if alternative is not None and alternative.type == "else_clause":
            alternative = children(alternative)[-1] if children(alternative) else None
        if condition in ("True", "False"):
            branch_taken = consequence if condition == "True" else alternative
            return "False" if branch_taken is None else self.statement(branch_taken, scope)
        if re.search(r"known\(", condition):
            condition = self.hold(condition)
        left = "False"
        before = dict(scope)
        self.conditions.append(condition)
        is_left = self.statement(consequence, scope)
        left = f"({condition}) and ({is_left})"
        self.conditions[-1] = f"not ({condition})"
        first, second = dict(scope), dict(before)
        if alternative is not None:
            is_left = self.statement(alternative, second)
            left = f"({left}) or (not ({condition}) and ({is_left}))"
        self.conditions.pop()
        self.merge(scope, condition, before, first, second)
        return simplify(left)

    def hold(self, condition: str) -> str:
        return condition

    def merge(
        self,
        scope: dict[str, Any],
        condition: str,
        before: dict[str, Any],
        first: dict[str, Any],
        second: dict[str, Any],
    ) -> None:
        """Set the variables changed by a branch to expressions of its condition."""
        scope.clear()
        scope.update(before)
        for name in {*first, *second}:
            a, b = first.get(name), second.get(name)
            if a == b:
                scope[name] = a
            elif name not in before:
                scope[name] = a if a is not None else b
            elif isinstance(a, Flags) and isinstance(b, Flags):
                scope[name] = a.where(condition, b)
            elif isinstance(a, Name) or isinstance(b, Name):
                scope[name] = a if isinstance(a, Name) else b
            elif isinstance(a, str) and isinstance(b, str):
                scope[name] = f"({a} if {condition} else {b})"
            else:
                raise NotUnderstood(f"a variable of two kinds: {name}")

    def loop(self, node: Node, scope: dict[str, Any]) -> None:
        declared = node.child_by_field_name("initializer")
        declarator = declared.children_by_field_name("declarator")[0]
        variable = text(declarator.child_by_field_name("declarator"))
        start = self.value(declarator.child_by_field_name("value"), scope)
        condition = node.child_by_field_name("condition")
        end = self.value(condition.child_by_field_name("right"), scope)
        if text(condition.child_by_field_name("operator")) != "<":
            raise NotUnderstood(f"loop: {text(condition)}")
        bounds = simplify(end) if start == "0" else f"{simplify(start)}, {simplify(end)}"
        for accumulated in set(re.findall(r"\b(\w+) = std::max\(\1,", node.text.decode())):
            self.add(f"let {accumulated} = {scope[accumulated]}")
            scope[accumulated] = accumulated
        inner = dict(scope)
        name = variable
        while any(loop.startswith(f"{name} ") for loop in self.loops):
            name += "_"
        inner[variable] = name
        self.loops.append(f"{name} in range({bounds})")
        self.statement(node.child_by_field_name("body"), inner)
        self.loops.pop()

    def range_loop(self, node: Node, scope: dict[str, Any]) -> None:
        variable = re.sub(r"[&\s]", "", text(node.child_by_field_name("declarator")))
        values = self.value(node.child_by_field_name("right"), scope)
        if body_match := re.fullmatch(rf"{variable} = (\w+);", text(node.child_by_field_name("body"))):
            self.add(f"set {values} = filled({scope[body_match[1]]})")
            return
        scope = {**scope, f"{variable}.second": variable}
        self.loops.append(f"{variable} in {values}")
        self.statement(node.child_by_field_name("body"), {**scope, variable: variable})
        self.loops.pop()

    def switch(self, node: Node, scope: dict[str, Any]) -> None:
        subject = self.value(node.child_by_field_name("condition"), scope)
        labels: list[str] = []
        labels_of_cases: list[str] = []
        for case in children(node.child_by_field_name("body")):
            value = case.child_by_field_name("value")
            if value is not None:
                labels.append(self.value(value, scope))
                labels_of_cases.append(labels[-1])
            body = [c for c in children(case) if value is None or c.id != value.id]
            if not body:
                continue
            case_labels = labels or labels_of_cases
            condition_text = f"{subject} in ({', '.join(case_labels)},)"
            self.conditions.append(condition_text if labels else f"not {condition_text}")
            self.block([c for c in body if c.type != "break_statement"], scope)
            self.conditions.pop()
            labels = []

    def attempt(self, node: Node, scope: dict[str, Any]) -> None:
        """Execute the loading of a tensor with one of two shapes."""
        start = len(self.rows)
        self.statement(node.child_by_field_name("body"), scope)
        handler = next(c for c in children(node) if c.type == "catch_clause")
        self.statement(handler.child_by_field_name("body"), scope)
        first, second = self.rows[start:]
        name, shape = first.body.split(": ", 1)
        self.rows[start:] = [Row(f"{name}: {shape} or {second.body.split(': ', 1)[1]}", first.when, first.loops)]

    def call(self, function: Function, arguments: list[Node], scope: dict[str, Any]) -> Any:
        inner = dict(function.scope)
        for index, name in enumerate(function.parameters):
            if index < len(arguments):
                argument = arguments[index]
                argument_text = text(argument)
                if argument_text in ("layer", "ml", "tn", "ctx_split", "ctx_layer") or argument_text.startswith(
                    ("ctx_", "layer.")
                ):
                    for scope_name, value in scope.items():
                        if scope_name.startswith(argument_text + "."):
                            inner[name + scope_name[len(argument_text) :]] = value
                    inner[name] = scope.get(argument_text, "None")
                    continue
                inner[name] = self.expression(argument, scope)
                if inner[name] == "0" and "flag" in name:
                    inner[name] = Flags()
            elif name in function.defaults:
                inner[name] = self.expression(function.defaults[name], scope)
                if inner[name] == "0" and "flag" in name:
                    inner[name] = Flags()
        self.statement(function.body, inner)
        # Tensors created by the function belong to the caller's layer.
        for index, name in enumerate(function.parameters):
            if index < len(arguments) and text(arguments[index]).startswith("layer"):
                for scope_name, value in inner.items():
                    if scope_name.startswith(name + "."):
                        scope[text(arguments[index]) + scope_name[len(name) :]] = value
        return "None"


def name_template(expression: str) -> str:
    """Return a concatenation of strings and numbers as a template."""
    if "{" in expression:
        parts = re.findall(r"'([^']*)'|\{([^}]*)\}", expression)
        return "".join(a or "{" + simplify(b) + "}" for a, b in parts)
    return str(ast.literal_eval(expression))


def boolean(value: str) -> str:
    return {"0": "False", "0.0": "False", "1": "True"}.get(value, value)


@dataclass
class Source:
    """llama.cpp's sources: the declarations that statements refer to."""

    root: Path
    by_layer = BY_LAYER
    #: The class whose methods create tensors.
    owner = "llama_model_base"
    #: Arguments of create_tensor before the name.
    leading = 0
    #: The enumerations and macros of these files are constants.
    headers = ("include/llama.h", "src/llama-hparams.h", "src/llama-arch.h", "src/llama-model.h")

    def __post_init__(self) -> None:
        src = self.root / "src"
        arch = (src / "llama-arch.cpp").read_text()
        self.archs = dict(re.findall(r"\{ *(LLM_ARCH_\w+), *\"([^\"]+)\" *\}", arch))
        self.keys = dict(re.findall(r"\{ *(LLM_KV_\w+), *\"([^\"]+)\" *\}", arch))
        self.tensors = dict(re.findall(r"\{ *(LLM_TENSOR_\w+), *\"([^\"]+)\" *\}", arch))
        self.fields = self._fields((src / "llama-hparams.h").read_text())
        self.members: dict[str, str] = {}
        self.functions: dict[str, Function] = {}
        #: Defaults of parameters, from the declarations of methods.
        self.declared: dict[str, dict[str, Node]] = {}
        self.read()

    def read(self) -> None:
        """Read the functions, and the class that loads each architecture."""
        src = self.root / "src"
        self.parents: dict[str, str] = {}
        for path in (src / "models").glob("*.h"):
            for child, parent in re.findall(r"struct (llama_model_\w+) : public (llama_model_\w+)", path.read_text()):
                self.parents[child] = parent
        self.members |= self._fields((src / "models" / "models.h").read_text()) | self._fields(
            (src / "llama-model.h").read_text()
        )
        for path in [*sorted((src / "models").glob("*.cpp")), src / "llama-model.cpp"]:
            self._read_functions(path)
        mapping = (src / "llama-model.cpp").read_text().split("llama_model_mapping(", 1)[1]
        self.classes: dict[str, str] = {}
        pending: list[str] = []
        for case, new in re.findall(r"case (LLM_ARCH_\w+):|return new (llama_model_\w+)\(", mapping):
            if case:
                pending.append(case)
            else:
                self.classes |= dict.fromkeys(pending, new)
                pending = []
                if new == "":
                    break

    def _fields(self, header: str) -> dict[str, str]:
        fields = {}
        for kind, names in re.findall(
            r"^\s*(std::\w+<[^;=]*?>|bool|float|u?int32_t|int|enum \w+|llama_\w+|std::string) +([\w, =.\-+{}]+);",
            header,
            re.M,
        ):
            for name in names.split(","):
                fields[name.split("=")[0].split("{")[0].strip()] = kind
        return fields

    def _read_functions(self, path: Path) -> None:
        # Without a semicolon the macro would belong to the next statement.
        tree = PARSER.parse(path.read_bytes().replace(b"LOADING_PRELUDE\n", b"\n"))

        def visit(node: Node) -> None:
            if node.type == "function_declarator" and b"=" in node.text:
                name = text(node.child_by_field_name("declarator"))
                self.declared[f"{self.owner}::{name}"] = Follower.parameters(None, node)[1]  # type: ignore[arg-type]
            if node.type == "function_definition":
                declarator = node.child_by_field_name("declarator")
                while declarator is not None and declarator.type in ("pointer_declarator", "reference_declarator"):
                    declarator = children(declarator)[0]
                if declarator is None or declarator.type != "function_declarator":
                    return
                name = text(declarator.child_by_field_name("declarator"))
                parameters, defaults = Follower.parameters(None, declarator)  # type: ignore[arg-type]
                defaults |= self.declared.get(name, {})
                self.functions[name] = Function(parameters, node.child_by_field_name("body"), {}, defaults)
                return
            for child in node.children:
                visit(child)

        visit(tree.root_node)

    def constant(self, name: str) -> str:
        return name.removeprefix("LLAMA_")

    def constants(self, names: Set[str]) -> list[str]:
        """Return the values of the used enumerators and macros."""
        values = {}
        for path in self.headers:
            header = re.sub(r"//.*|/\*.*?\*/", "", (self.root / path).read_text())
            for macro, number in re.findall(r"#define +(LLAMA_\w+) +(\d+)", header):
                values[macro] = int(number)
            for body in re.findall(r"enum \w+ *\{(.*?)\}", header, re.S):
                number = -1
                for enumerator, digits in re.findall(r"([A-Z]\w+) *(?:= *(-?\w+))? *(?:,|$)", body.strip()):
                    number = int(digits, 0) if re.match(r"-?\d", digits) else values.get(digits, number + 1)
                    values[enumerator] = number
        sources = {path: path.read_text() for path in sorted((self.root / "src" / "models").glob("*.cpp"))}
        for text_of_source in sources.values():
            pairs = re.findall(r"^static const(?:expr)? \w+ ([A-Z][A-Z_0-9]+) *= *(\d+);", text_of_source, re.M)
            values |= {name: int(number) for name, number in pairs}
        lines = [f"{self.constant(k)} = {v}" for k, v in sorted(values.items()) if self.constant(k) in names]
        array = r"std::array<uint32_t, LLAMA_MAX_LAYERS> (\w+) = \{(.*?)\}"
        for text_of_source in sources.values():
            for name, body in re.findall(array, text_of_source, re.S):
                lines += [f"{name} = [{', '.join(re.findall(r'[0-9]+', body))}]"] if name in names else []
        return lines

    def defaults(self, names: Set[str]) -> list[str]:
        """Return the values that fields have before keys are read."""
        header = (self.root / "src/llama-hparams.h").read_text()
        pairs = re.findall(r"^ +[\w:<>, ]+? (\w+) *= *([-\w.:]+?)f?;", header, re.M)
        values = {
            k: self.constant(v.split("::")[-1]).replace("true", "True").replace("false", "False") for k, v in pairs
        }
        lines = []
        for name, kind in sorted((self.members | self.fields).items()):
            if name in names and not (name == "n_layer" and "n_layer_all" in self.fields):
                array = "[0] * 512" if kind.startswith(("std::array", "std::bitset")) else "[]"
                value = array if kind.startswith("std::") and kind != "std::string" else values.get(name, "0")
                lines.append(f"{name} = {value}")
        return lines

    def pre_tokenizers(self) -> list[str]:
        """Return the names of pre-tokenizers."""
        return sorted(set(re.findall(r'tokenizer_pre == "([^"]+)"', (self.root / "src/llama-vocab.cpp").read_text())))

    def scales(self) -> list[str]:
        """Return the scales that any layer's tensor may have."""
        body = self.functions["llama_model_base::load_tensors"].body.text.decode()
        rows = []
        for tensor, suffix, dims in re.findall(r"tn\((LLM_TENSOR_\w+), *\"(\w*scale)\", i\), \{(\w+)\}", body):
            name = self.tensors[tensor].replace("%d", "{i}")
            rows.append(f"  {name}.{suffix}: [{dims}] optional when has(f'{name}.weight')")
        output = [
            f"{self.tensors[tensor]}.{suffix}: [{dims}] optional when has_type('{self.tensors[tensor]}.weight', '{t}')"
            for t, block in re.findall(r"output->type == GGML_TYPE_(\w+)\) \{(.*?)\n {8}\}", body, re.DOTALL)
            for tensor, suffix, dims in re.findall(r"tn\((LLM_TENSOR_\w+), *\"(\w*scale)\"\), \{(\w+)\}", block)
        ]
        return [*output, "for i in range(n_layer_all)", *rows] if rows else []

    def arch_enum(self, arch: str) -> str:
        return next(str(k) for k, v in self.archs.items() if v == arch)

    def kind_of(self, type_text: str) -> str:
        t = type_text.replace("const ", "").replace("enum ", "").strip()
        array = re.match(r"std::(array|vector)<([\w:]+)", t)
        if array:
            t = array[2]
        kinds = {
            "uint32_t": "u32", "float": "f32", "bool": "bool", "std::string": "str", "int32_t": "i32", "int": "i32",
            "uint64_t": "u64", "llama_token": "i32", "llama_pooling_type": "u32",
        }  # fmt: skip
        return kinds.get(t, t) + (" vector" if array and array[1] == "vector" else "")

    def field_kind(self, name: str) -> str:
        if name not in self.fields:
            name = name.split(".")[-1]
        return self.kind_of(str(self.fields[name]))

    def member_kind(self, name: str) -> str:
        return self.kind_of(self.members[name])

    def key_name(self, enum: str) -> str:
        return str(self.keys[enum]).replace("%s", "")

    def tensor_name(self, enum: str, arch: str) -> str | None:
        return str(self.tensors[enum])

    def helper(self, name: str) -> Function | None:
        for candidate in (name, f"{self.owner}::{name}"):
            if candidate in self.functions:
                return self.functions[candidate]
        return None

    def method(self, cls: str, name: str) -> Function:
        while f"{cls}::{name}" not in self.functions:
            cls = self.parents[cls]
        return self.functions[f"{cls}::{name}"]

    def common_rows(self) -> list[Row]:
        """Return the keys that every architecture has."""
        follower = Follower(self, "")
        body = children(self.functions["llama_model_base::load_hparams"].body)
        first = next(i for i, node in enumerate(body) if "LLM_KV_CONTEXT_LENGTH" in node.text.decode())
        last = next(i for i, node in enumerate(body) if node.text.startswith(b"load_arch_hparams"))
        follower.block(body[first:last], {})
        return follower.rows

    def rows(self, arch: str) -> list[Row]:
        follower = Follower(self, arch)
        cls = self.classes[self.arch_enum(arch)]
        follower.statement(self.method(cls, "load_arch_hparams").body, {})
        follower.add("tensors")
        follower.statement(self.method(cls, "load_arch_tensors").body, {"n_embd_gqa": "n_embd_v_gqa(0)"})
        return follower.rows


class IkSource(Source):
    """ik_llama.cpp's sources: all architectures in two functions."""

    by_layer = frozenset(BY_LAYER - {"n_ff_exp", "n_expert_used", "n_rot"})
    owner = "create_tensors_helper"
    leading = 1
    headers = ("include/llama.h", "src/llama-hparams.h", "src/llama-hparams.cpp", "src/llama-arch.h")

    def read(self) -> None:
        src = self.root / "src"
        self.members = {"name": "std::string"}
        for name in ("llama-hparams.cpp", "llama-load-tensors.cpp"):
            self._read_functions(src / name)
        names = (src / "llama-model.cpp").read_text().split("LLM_TENSOR_NAMES = {", 1)[1].split("LLM_TN::", 1)[0]
        self.names = {
            arch: dict(re.findall(r"\{ *(LLM_TENSOR_\w+), *\"([^\"]+)\" *\}", body))
            for arch, body in re.findall(r"\b(LLM_ARCH_\w+),\s*\{(.*?)\n        \}", names, re.S)
        }
        body = self.functions["llm_load_hparams"].body
        self.statements = children(body)
        self.switch_index = next(i for i, n in enumerate(self.statements) if n.type == "switch_statement")
        self.cases = self._cases(self.statements[self.switch_index])
        self.classes = dict.fromkeys(self.names, "")
        self.creators = self._cases(
            next(
                n
                for n in children(self.functions["create_tensors_helper::create_tensors"].body)
                if n.type == "switch_statement"
            )
        )

    def _cases(self, switch: Node) -> dict[str, list[Node]]:
        """Return the statements of each case of a switch over architectures."""
        cases: dict[str, list[Node]] = {}
        pending: list[str] = []
        for case in children(switch.child_by_field_name("body")):
            value = case.child_by_field_name("value")
            if value is None:
                continue
            pending.append(text(value))
            statements = [c for c in children(case) if c.id != value.id and c.type != "break_statement"]
            if statements:
                cases |= dict.fromkeys(pending, statements)
                pending = []
        return cases

    def tensor_name(self, enum: str, arch: str) -> str | None:
        return self.names[self.arch_enum(arch)].get(enum)

    def scales(self) -> list[str]:
        return []

    def common_rows(self) -> list[Row]:
        follower = Follower(self, "")
        first = next(i for i, n in enumerate(self.statements) if b"LLM_KV_BLOCK_COUNT" in n.text)
        nodes = [n for n in self.statements[first : self.switch_index] if b"vocab_only" not in n.text]
        follower.block(nodes, {"ignore_vocab": "False"})
        return follower.rows

    def rows(self, arch: str) -> list[Row]:
        follower, enum = Follower(self, arch), self.arch_enum(arch)
        follower.block(self.cases.get(enum, []), {})
        follower.add("tensors")
        follower.add("fail when n_expert > 0 and n_expert_used == 0")
        call = re.search(r"(create_\w+)\((.*?)\);", self.creators[enum][0].text.decode())
        if call is None:
            raise NotUnderstood(f"no tensors of {arch}")
        function = self.functions[f"create_tensors_helper::{call[1]}"]
        scope = {"n_embd_gqa": "n_embd_v_gqa(0)", "n_embd": "n_embd // (n_deepstack_layers + 1)"}
        arguments = call[2].split(", ")
        for index, name in enumerate(function.parameters):
            if index < len(arguments) and name != "tn":
                scope[name] = {"false": "False", "true": "True"}.get(arguments[index], arguments[index])
            elif name in function.defaults:
                scope[name] = follower.expression(function.defaults[name], {})
        follower.statement(function.body, scope)
        return follower.rows


SOURCES = {"llama.cpp": Source, "ik_llama.cpp": IkSource}

#: Names that functions of hyperparameters use.
USED = frozenset(
    {
        *(
            "n_layer_all",
            "n_layer_nextn",
            "n_head_arr",
            "n_head_kv_arr",
            "n_ff_arr",
            "n_ff_exp_arr",
            "n_expert_used_arr",
        ),
        *("is_swa_impl", "is_recr_impl", "is_indexer_full_impl", "is_ple_impl", "n_embd_head_k_full", "n_rot_full"),
        *("n_embd_head_v_full", "n_embd_head_k_swa", "n_embd_head_v_swa", "n_rot_swa", "n_embd_head_k_mla_impl"),
        *("n_embd_head_v_mla_impl", "n_layer_kv_from_start", "n_embd_out_impl", "n_embd_inp_impl"),
        *(
            "n_embd_inp_enc_impl",
            "n_cls_out",
            "n_deepstack_layers",
            "swa_layers",
            "recurrent_layer_arr",
            "n_embd",
            "n_layer",
            "n_rot",
            "rope_dim_per_layer",
        ),
    }
)


def without_unused(rows: list[Row], common: list[Row]) -> list[Row]:
    """Return rows without those that set names unused by them and by the common rows."""
    while True:
        used = USED.union(*(row.names for row in (*rows, *common)))
        rows_used = [row for row in rows if not row.target or row.target in used]
        if len(rows_used) == len(rows):
            return rows
        rows = rows_used


def render(rows: list[Row]) -> list[str]:
    """Return lines; the rows of a loop are indented below it."""
    lines: list[str] = []
    current: tuple[str, ...] = ()
    for row in rows:
        if row.loops != current:
            common = 0
            while common < min(len(current), len(row.loops)) and current[common] == row.loops[common]:
                common += 1
            lines += [f"{'  ' * depth}for {row.loops[depth]}" for depth in range(common, len(row.loops))]
            current = row.loops
        lines.append(f"{'  ' * len(current)}{row}")
    return lines


def main() -> None:
    program, root = sys.argv[1], Path(sys.argv[2])
    source = SOURCES[program](root)
    common = without_unused(source.common_rows(), [])
    tables: dict[tuple[str, ...], list[str]] = {}
    failures, unchecked = [], []
    for arch in sorted(source.archs.values()):
        enum = source.arch_enum(arch)
        if enum not in source.classes or arch in ("clip", "(unknown)"):
            continue
        try:
            lines = tuple(render(without_unused(source.rows(arch), common)))
        except (NotUnderstood, KeyError, AttributeError, IndexError, SyntaxError, TypeError, ValueError) as e:
            failures.append(f"{arch}: {type(e).__name__}: {e}")
            unchecked.append(arch)
            continue
        tables.setdefault(lines, []).append(arch)
    text_of_tables = "\n".join("\n".join(lines) for lines in (*tables, tuple(render(common))))
    names = USED.union(re.findall(r"[A-Za-z_]\w*", re.sub(r"(?m)^ *key \S+ = \S+:", "", text_of_tables)))
    defaults = source.defaults(names)
    constants = source.constants(names.union(re.findall(r"\w+$", "\n".join(defaults), re.M)))
    print("[constants]", *constants, "", sep="\n")
    print("[defaults]", *defaults, "", sep="\n")
    print("[unchecked]", *unchecked, "", sep="\n")
    print("[pre-tokenizers]", *source.pre_tokenizers(), "", sep="\n")
    print("[common]", *render(common), "", sep="\n")
    print("[scales]", *source.scales(), "", sep="\n")
    for lines, archs in tables.items():
        print(f"[{' '.join(archs)}]", *lines, "", sep="\n")
    print(*failures, f"{len(failures)} not understood, {len(source.archs)} architectures", sep="\n", file=sys.stderr)


if __name__ == "__main__":
    main()
