"""Which stored tensors make up a packed weight. Errors name the missing or wrong tensor."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from disagg.errors import ModelError
from disagg.model.checkpoint import TensorHeader
from disagg.model.packed.grid import Parts

Shape = tuple[int, ...]


@dataclass(frozen=True)
class PackedWeight:
    """A weight of the model that is made of several stored tensors.

    name:   of the model's weight
    shape:  of the model's weight
    parts:  the names of the stored tensors, by their part
    unpack: writes the weight into a tensor of `shape` in the model's dtype
    """

    name: str
    shape: Shape
    parts: Mapping[str, str]
    unpack: Callable[[Parts, Tensor], None]


@dataclass(frozen=True)
class TensorTable:
    """The stored tensors of a checkpoint, and which of them packed weights have taken."""

    headers: Mapping[str, TensorHeader]
    taken: set[str] = field(default_factory=set)

    def ending(self, suffix: str, *dtypes: str) -> Iterator[str]:
        """The names with a suffix, and of one of these dtypes, that nothing has taken yet."""
        for name, header in self.headers.items():
            is_free = name not in self.taken and name.endswith(suffix)
            if is_free and (not dtypes or header.dtype in dtypes):
                yield name

    def take(self, name: str, weight: str, *dtypes: str) -> Shape:
        """The shape of a tensor that a weight needs, which nothing else may take."""
        header = self.headers.get(name)
        if header is None:
            raise ModelError(f"{weight} is packed, but {name} is missing")
        if header.dtype not in dtypes:
            raise ModelError(
                f"{name} is stored as {header.dtype}; expected {' or '.join(dtypes)}"
            )
        self.taken.add(name)
        return header.shape

    def take_shaped(
        self, name: str, weight: str, dtypes: tuple[str, ...], *shapes: Shape
    ) -> Shape:
        """Like `take`, of a tensor that has to have one of these shapes."""
        shape = self.take(name, weight, *dtypes)
        if shape not in shapes:
            raise wrong_shape(name, shape, *shapes)
        return shape


def wrong_shape(name: str, shape: Shape, *shapes: Shape) -> ModelError:
    expected = " or ".join(str([*x]) for x in shapes)
    return ModelError(f"{name} has the shape {[*shape]}; expected {expected}")


def matrix_shape(name: str, shape: Shape) -> tuple[int, int]:
    """Rows and columns; ModelError for a tensor that is not a matrix."""
    if len(shape) != 2:
        raise ModelError(f"{name} has the shape {[*shape]}; expected a matrix")
    rows, columns = shape
    return rows, columns


def group_count(name: str, size: int, group: int) -> int:
    """The number of groups of a size; -1: one group of all. ModelError if they do not divide it."""
    length = size if group == -1 else group
    if length <= 0 or size % length:
        raise ModelError(
            f"{name} has {size} inputs, which do not divide into groups of {group}"
        )
    return size // length
