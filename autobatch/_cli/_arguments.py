"""What the options of `autobatch tune` mean: shapes, sizes, axes, argnums. jax is not needed."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

import click

DTYPES = {
    "f16": "float16",
    "bf16": "bfloat16",
    "f32": "float32",
    "f64": "float64",
    "i8": "int8",
    "i16": "int16",
    "i32": "int32",
    "i64": "int64",
    "u8": "uint8",
    "u16": "uint16",
    "u32": "uint32",
    "u64": "uint64",
    "bool": "bool",
    "c64": "complex64",
    "c128": "complex128",
    "key": "key",
}
"""The dtypes by their short names; a key is one of `jax.random.key`."""

_ARGUMENT = re.compile(r"(\w+)\[\s*((?:\d{1,18}|N)(?:\s*,\s*(?:\d{1,18}|N))*|)\s*\]")


@dataclass(frozen=True, kw_only=True)
class Argument:
    """An argument that is made up.

    Attributes:
        dtype: its dtype.
        shape: its shape; None stands for a size that is given elsewhere.
    """

    dtype: str
    shape: tuple[int | None, ...]

    def sized(self, size: int | None) -> tuple[str, tuple[int, ...]]:
        """Returns dtype and shape with `size` in place of every None."""
        return self.dtype, tuple(size or 0 if each is None else each for each in self.shape)


class ArgumentType(click.ParamType):
    """`f32[200,1000]`: dtype and shape.

    >>> ArgumentType().convert("f32[N,3]", None, None)
    Argument(dtype='float32', shape=(None, 3))
    """

    name = "argument"

    def convert(
        self, value: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> Argument:
        match = _ARGUMENT.fullmatch(value.strip())
        if match is None:
            self.fail(f"{value!r} is no dtype with a shape such as f32[200,1000].", param, ctx)
        if match[1] not in DTYPES:
            self.fail(f"{match[1]!r} is none of {', '.join(DTYPES)}.", param, ctx)
        sizes = [each.strip() for each in match[2].split(",") if each.strip()]
        shape = tuple(None if each == "N" else int(each) for each in sizes)
        return Argument(dtype=DTYPES[match[1]], shape=shape)


class SizesType(click.ParamType):
    """`64,256,1024`: batch sizes."""

    name = "sizes"

    def convert(
        self, value: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> list[int]:
        if not re.fullmatch(r"\s*\d{1,18}(\s*,\s*\d{1,18})*\s*", value):
            self.fail(f"{value!r} is no list of sizes such as 64,256,1024.", param, ctx)
        return list(dict.fromkeys(int(each) for each in value.split(",")))


class ArgnumsType(click.ParamType):
    """`0,2`: positions of arguments; `()` for none.

    >>> ArgnumsType().convert("0,-1", None, None), ArgnumsType().convert("()", None, None)
    ((0, -1), ())
    """

    name = "argnums"

    def convert(
        self, value: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        if value.strip() == "()":
            return ()
        if not re.fullmatch(r"\s*-?\d{1,9}(\s*,\s*-?\d{1,9})*\s*", value):
            self.fail(f"{value!r} is no list of arguments such as 0 or 0,2.", param, ctx)
        return tuple(int(each) for each in value.split(","))


class LiteralType(click.ParamType):
    """`(None, 0)`: a Python literal, kept as text."""

    name = "literal"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            return repr(ast.literal_eval(value.strip()))
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            self.fail(f"{value!r} is no Python literal such as '(None, 0)'.", param, ctx)
