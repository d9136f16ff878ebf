"""The kernels' inline assembly, executed with numpy: Triton's interpreter has none."""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def halves(register: np.ndarray) -> np.ndarray:
    """The two fp16 of 32 bits."""
    return register.view(np.float16)


def permute(a: np.ndarray, b: np.ndarray, order: np.uint32) -> np.ndarray:
    """The byte of a and b, in this order, that each four bits of `order` name."""
    both = a.astype(np.uint64) | b.astype(np.uint64) << 32
    chosen = ((both >> (order >> 4 * i & 7) * 8 & 255) << 8 * i for i in range(4))
    return sum(chosen, np.zeros_like(both)).astype(np.uint32)


INSTRUCTIONS = {
    "and.b32": lambda a, b: a & b,
    "shr.b32": lambda a, b: a >> b,
    "prmt.b32": permute,
    "set.eq.f16x2.f16x2": lambda a, b: (
        (halves(a) == halves(b)).astype(np.float16).view(np.uint32)
    ),
}


def execute(text: str, operands: list[np.ndarray]) -> np.ndarray:
    """What register $0 holds in the end; operands: 32-bit registers of all lanes, from $1 on.

    ValueError for an instruction that is not known here.
    """
    registers = {f"${i}": values for i, values in enumerate(operands, 1)}
    for line in filter(None, (x.strip() for x in re.split("[;{}]", text))):
        name, *arguments = re.findall(r"[^\s,]+", line)
        if name == ".reg":
            continue
        if name not in INSTRUCTIONS:
            raise ValueError(
                f"unknown instruction {line!r}; known are {', '.join(INSTRUCTIONS)}"
            )
        into, *sources = arguments
        values = (
            registers[x] if x in registers else np.uint32(int(x, 0)) for x in sources
        )
        registers[into] = INSTRUCTIONS[name](*values)
    return registers["$0"]


@dataclass(frozen=True)
class Call:
    """What the interpreter asks of inline assembly that was built."""

    result: TensorHandle

    def get_result(self, index: int) -> TensorHandle:
        assert index == 0, "one output register is all that kernels use"
        return self.result


def create_inline_asm(
    builder: Any,
    text: str,
    constraints: str,
    values: list[TensorHandle],
    types: Any,
    *rest: Any,
) -> Call:
    """As the compiler's builder: each instance takes two neighbouring items of 16 bits."""
    pure, pack = rest
    assert (pure, pack, constraints) == (True, 2, "=r,r,r"), (
        "two items in, two items out"
    )
    assert all(kind.scalar == tl.float16 for kind in types), "which are fp16"
    packed = [np.ascontiguousarray(x.data).reshape(-1).view(np.uint32) for x in values]
    result = execute(text, packed).view(np.float16)
    return Call(TensorHandle(result.reshape(values[0].data.shape), tl.float16))


def assemble(monkeypatch: Any) -> None:
    monkeypatch.setattr(InterpreterBuilder, "create_inline_asm", create_inline_asm)
