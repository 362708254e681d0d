"""The patches of an image model: the convolution that cuts images, and learned or fixed positions of the patches.

Found by structure in models of this package, of transformers and timm, and in hand-written models. Tokens are the
patches row by row, after the tokens that are no patches, such as a class token.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from thrifty.core.errors import RefusedError, class_name, reason_of
from thrifty.core.module_notes import ModuleNote
from thrifty.core.module_state import ModuleState
from thrifty.core.out_of_memory import is_out_of_memory
from thrifty.core.randomness import GeneratorStates
from thrifty.kernels.image_resizing import resized_patches, resized_positions
from thrifty.modeling.module_surgery import find_stacks, is_under, wrap_forward

SIZES = ("image_size", "img_size", "input_size")
"""Attributes in which models keep the size of images, and compare it with that of their input."""
COUNTS = ("num_patches", "num_positions", "grid_size", "patch_size")
"""Attributes in which models keep numbers that depend on the size of patches."""
LEAST = 4
"""Number of positions of the smallest table; a class token is a table of one."""
MOST_BEFORE = 2
"""Maximum number of positions before those of patches, if the size of full images is unknown: a class token and a
distillation token."""
Grid = tuple[int, int]
"""Height and width of images in patches."""
Layout = tuple[int, Grid]
"""Number of positions before those of patches, and height and width of full images in patches."""


class _InapplicableError(ValueError):
    """A way to call a model that has no meaning for its position tables."""


@dataclass(frozen=True)
class Way:
    """A way to call a model with images of another size: with interpolated positions, of which `before` are not of
    patches. None stands for any number, for images whose patches could be those of square images."""

    before: int | None
    spare: bool = False
    """True to add a row to the tables. A model that interpolates again, as for square images, then fails."""


@dataclass(frozen=True)
class PositionTable:
    """Positions (1, n, d) or (n, d) of the tokens of full images: a parameter or buffer of `owner`."""

    owner: nn.Module
    name: str
    full: Grid
    """Height and width of full images in patches."""
    is_stated: bool
    """True if the model states the size of full images. Otherwise `full` is a square."""
    before: int
    """Number of positions before those of patches."""
    ids: tuple[tuple[nn.Module, str], ...] = ()
    """Buffers with the indices of positions, for a table that is an embedding."""

    @property
    def value(self) -> Tensor:
        return getattr(self.owner, self.name)

    def resized(self, value: Tensor, grid: Grid, layout: Layout | None = None) -> Tensor:
        """Return the table `value` of full images, (1, n, d) or (n, d), for images of another height and width in
        patches."""
        before, full = layout or (self.before, self.full)
        return value if grid == full else resized_table(value, grid, before, full)

    def layout(self, count: int, grid: Grid, before: int | None) -> Layout:
        """Return the layout of a table of `count` rows for images of another height and width in patches. Full images
        of unstated size have the aspect ratio of these images: up to less than a patch, because each side was rounded,
        or exactly if `before` is None. Raise _InapplicableError if `before` fits no such images."""
        if not self.is_stated and grid[0] != grid[1]:
            numbers = range(MOST_BEFORE + 1) if before is None else [before]
            options = [(each, full) for each in numbers for full in _grids(count - each)]
            nearest = min(options, key=lambda option: _difference(option[1], grid))
            difference = _difference(nearest[1], grid)
            if difference == 0 or (before is not None and difference < 1):
                return nearest
        if before not in (None, self.before):
            raise _InapplicableError
        return self.before, self.full

    def put(self, value: Tensor) -> None:
        """Replace the table, without a check of its type, and the indices of positions."""
        place = self.owner._parameters if self.name in self.owner._parameters else self.owner._buffers
        place[self.name] = value  # type: ignore[assignment]
        for owner, name in self.ids:
            like = owner._buffers[name]
            assert like is not None
            count = torch.arange(value.shape[-2], dtype=like.dtype, device=like.device)
            owner._buffers[name] = count.reshape((1,) * (like.ndim - 1) + (-1,))


@dataclass(frozen=True)
class PatchGrid:
    """The convolution that cuts images into patches, and the position tables of a model."""

    name: str
    cut: nn.Conv2d
    tables: tuple[PositionTable, ...]
    owners: tuple[nn.Module, ...]
    """Modules that contain the convolution, from the model down to the convolution."""

    @property
    def patch(self) -> int:
        return self.cut.stride[0]

    @property
    def interpolates(self) -> bool:
        """True if the model states that it interpolates its positions itself, as Thrifty's models do."""
        return any(getattr(owner, "interpolates_positions", False) for owner in self.owners)

    @property
    def encoder(self) -> nn.Module:
        """The outermost module whose first argument can be images, such as the image tower of a CLIP model."""
        return next(each for each in self.owners if next(iter(signature(each.forward).parameters)) != "input_ids")


TABLES: ModuleNote[tuple[tuple[str, str, int], ...]] = ModuleNote("position_tables")
"""Module and name of each position table of a model, with the number of positions before those of patches. Noted at
first, because tables of large patches may be as small as other parameters."""
WAYS: ModuleNote[dict[Grid, Way | None]] = ModuleNote("accepts_other_sizes")
"""On a model that accepts images of other sizes: the way that worked for each height and width in pixels; None if the
model itself accepts them."""


def resized_table(value: Tensor, grid: Grid, before: int, full: Grid | None = None) -> Tensor:
    """Return positions (1, n, d) or (n, d) of a grid `full`, by default a square, for another height and width in
    patches."""
    shape = (*value.shape[:-2], before + math.prod(grid), value.shape[-1])
    return resized_positions(value.reshape(1, *value.shape[-2:]), grid, before, full).reshape(shape)


def _grids(count: int) -> list[Grid]:
    return [(height, count // height) for height in range(1, count + 1) if count % height == 0]


def _difference(full: Grid, grid: Grid) -> float:
    """Return the least possible difference, in patches, between a side of `grid` and the same side of a grid with the
    aspect ratio of `full`."""
    return abs(full[0] * grid[1] - full[1] * grid[0]) / sum(full)


@torch.compiler.disable  # a model that is compiled as a whole would trace it
def find_grid(model: nn.Module) -> PatchGrid:
    """Return the patches of a model. Raise RefusedError without a convolution in front of its blocks."""
    stacks = find_stacks(model)
    inside = {name for name, _ in model.named_modules() if any(is_under(name, stack) for stack in stacks)}
    cuts = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Conv2d) and name not in inside and module.stride[0] == module.stride[1]
    }
    name, cut = next(iter(cuts.items()), ("", None))
    if len(cuts) > 1:  # in a stem of convolutions, the last gives the tokens
        width = [(each, module) for each, module in cuts.items() if module.stride == module.kernel_size]
        name, cut = width[0] if width else list(cuts.items())[-1]
    if cut is None:
        raise RefusedError(
            f"no convolution that cuts images into patches was found in {class_name(model)}",
            fix="use an image model, such as --set model.preset=vit-nano",
        )
    parts = name.split(".")
    owners = tuple(model.get_submodule(".".join(parts[:count])) for count in range(len(parts) + 1))
    stated = [(height // cut.stride[0], width // cut.stride[0]) for height, width in _stated_sizes(model, owners)]
    if (places := TABLES.get(model)) is None:
        around = (".".join(parts[:count]) for count in range(len(parts) - 1, -1, -1))
        found = (tuple(_search_tables(model, each, inside, cut.out_channels, stated)) for each in around)
        places = TABLES.set(model, next(filter(None, found), ()))
    return PatchGrid(name, cut, tuple(_table(model, stated, *place) for place in places), owners)


def _stated_sizes(model: nn.Module, owners: Sequence[nn.Module]) -> list[tuple[int, int]]:
    """Return heights and widths of images in pixels from attributes of the model and of modules around its patches."""
    places = [*owners, *filter(None, [getattr(model, "config", None)])]
    found = [getattr(place, "__dict__", {}).get(name) for place in places for name in SIZES]
    sides = [tuple(each) if isinstance(each, tuple | list) else (each,) for each in found if each]
    return [(each * 2)[-2:] for each in sides]


def images_among(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return the first images (b, c, h, w) among arguments; None if there are none."""
    return next((each for each in (*args, *kwargs.values()) if isinstance(each, Tensor) and each.ndim == 4), None)


def _search_tables(
    model: nn.Module, around: str, inside: set[str], width: int, stated: Sequence[Grid]
) -> Iterator[tuple[str, str, int]]:
    """Yield the largest tables of the width of a token in the module `around`, which has the convolution, with the
    number of positions that are not of patches. Full images are one of the `stated` grids, or square."""
    found: dict[tuple[str, str], int] = {}
    for path, module in model.named_modules():
        is_embedding = isinstance(module, nn.Embedding)
        is_outside = path != around and not is_under(path, around)
        if is_outside or path in inside or (type(module).__module__.startswith("torch.nn") and not is_embedding):
            continue
        tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        found |= {(path, name): tensor.shape[-2] for name, tensor in tensors if _is_table(tensor, width)}
    for (path, name), count in found.items():
        if count == max(found.values()):
            patches = next(
                (size for size in map(math.prod, stated) if size <= count < 2 * size), math.isqrt(count) ** 2
            )
            yield path, name, count - patches


def _table(model: nn.Module, stated: Sequence[Grid], path: str, name: str, before: int) -> PositionTable:
    owner = model.get_submodule(path)
    count = getattr(owner, name).shape[-2]
    ids = [
        (module, buffer)
        for module in model.modules()
        for buffer, value in module.named_buffers(recurse=False)
        if isinstance(owner, nn.Embedding) and not value.is_floating_point() and value.numel() == count
    ]
    full = next((grid for grid in stated if math.prod(grid) == count - before), None)
    side = math.isqrt(count - before)
    return PositionTable(owner, name, full or (side, side), full is not None, before, tuple(ids))


def _is_table(tensor: Tensor, width: int) -> bool:
    is_flat = tensor.ndim == 2 or (tensor.ndim == 3 and tensor.shape[0] == 1)
    return is_flat and tensor.is_floating_point() and tensor.shape[-1] == width and tensor.shape[-2] >= LEAST


@torch.no_grad()
def resize_patches(grid: PatchGrid, patch: int) -> None:
    """Change the side of patches in pixels. The convolution's weight and all positions are resized, and the numbers
    that the model keeps follow."""
    cut, before = grid.cut, grid.patch
    weight = resized_patches(cut.weight, patch)
    cut.weight = nn.Parameter(weight, cut.weight.requires_grad)
    cut.kernel_size = cut.stride = (patch, patch)
    changed: dict[int, int] = {before: patch}
    for table in grid.tables:
        full = (table.full[0] * before // patch, table.full[1] * before // patch)
        value = table.resized(table.value, full).clone()
        changed |= {math.prod(table.full): math.prod(full), table.value.shape[-2]: value.shape[-2]}
        changed |= dict(zip(table.full, full, strict=True))
        is_parameter = isinstance(table.value, nn.Parameter)
        table.put(nn.Parameter(value, table.value.requires_grad) if is_parameter else value)
        if isinstance(table.owner, nn.Embedding):
            table.owner.num_embeddings = value.shape[-2]
    for owner in {*grid.owners, *(table.owner for table in grid.tables)}:
        for name in COUNTS:
            _replace_number(owner, name, changed if name != "patch_size" else {before: patch})


def _replace_number(owner: nn.Module, name: str, changed: dict[int, int]) -> None:
    value = vars(owner).get(name)
    if isinstance(value, int) and value in changed:
        setattr(owner, name, changed[value])
    elif isinstance(value, tuple | list) and all(each in changed for each in value):
        setattr(owner, name, type(value)(changed[each] for each in value))


def accept_other_sizes(model: nn.Module, who: str) -> None:
    """Make a model accept images of other sizes than it was built for. Its positions are interpolated at each call,
    unless the model does this itself. A call that fails nevertheless raises RefusedError; `who` is the technique that
    the message names."""
    sees_images = any(isinstance(module, nn.Conv2d) for module in model.modules())
    if sees_images and WAYS.get(model) is None:
        WAYS.set(model, {})
        wrap_forward(model, partial(_at_size, who))


def _at_size(who: str, model: nn.Module, inner: Any, *args: Any, **kwargs: Any) -> Any:
    images = images_among(args, kwargs)
    grid = None
    with suppress(RefusedError):  # a model without patches, which may accept any size
        grid = find_grid(model)
    if images is None or grid is None or grid.interpolates or not _differs(model, grid, images):
        return inner(*args, **kwargs)
    height, width = images.shape[-2:]
    known, reason = WAYS.of(model), ""
    ways = [known[height, width]] if (height, width) in known else []
    states = ModuleState(model), GeneratorStates({images.device, *(each.device for each in model.parameters())})
    for way in (*ways, *_ways(grid)):
        try:
            with _positions_for(grid, images, way) if way else nullcontext():
                output = inner(*args, **kwargs)
        except _InapplicableError:
            pass
        except (RuntimeError, ValueError, AssertionError) as error:
            if is_out_of_memory(error):
                raise
            reason = reason_of(error)  # the error itself keeps the activations
        else:
            known[height, width] = way
            return output
        for state in states:  # a call has the effects of one pass
            state.put_back()
    raise RefusedError(
        f"{class_name(model)} does not accept images of {height} x {width} pixels: {reason}",
        fix=f"--without {who}; or use a model whose positions can be interpolated, such as a ViT",
    )


def _ways(grid: PatchGrid) -> list[Way | None]:
    """Return ways to call a model with images of another size, in the order in which they are tried. Interpolated
    positions come first, because a model that reads only the first rows of its table would not fail without them. For
    the same reason, few positions that are not of patches come before many."""
    if not grid.tables:
        return [None, Way(None)]
    numbers = {table.before for table in grid.tables}
    if not all(table.is_stated for table in grid.tables):
        numbers.update(range(MOST_BEFORE + 1))
    return [*map(Way, sorted(numbers)), Way(None, spare=True), None, Way(None)]


@torch.compiler.disable
def _differs(model: nn.Module, grid: PatchGrid, images: Tensor) -> bool:
    """Return True if images may have another size than the model's."""
    sizes = {side for size in _stated_sizes(model, grid.owners) for side in size}
    sizes |= {count * grid.patch for table in grid.tables for count in table.full}
    return bool(sizes) and len({*sizes, *images.shape[-2:]}) > 1


@contextmanager
def _positions_for(grid: PatchGrid, images: Tensor, way: Way) -> Iterator[None]:
    """Interpolate the positions inside the context, once the convolution has cut the images, and let modules that
    compare the size of images accept this size."""
    before = [(table, table.value, [owner._buffers[name] for owner, name in table.ids]) for table in grid.tables]
    sizes = [(owner, name, vars(owner)[name]) for owner in grid.owners for name in SIZES if name in vars(owner)]
    full: list[Tensor] = []

    def interpolate(cut: nn.Module, inputs: Any, output: Tensor) -> None:
        height, width = output.shape[-2:]
        looks_square = height != width and math.isqrt(height * width) ** 2 == height * width
        if grid.tables and looks_square != (way.before is None):
            raise _InapplicableError
        if not full:  # read here, where a sharded table is whole
            full.extend(table.value for table in grid.tables)
        for table, value in zip(grid.tables, full, strict=True):
            layout = table.layout(value.shape[-2], (height, width), way.before)
            resized = table.resized(value, (height, width), layout)
            if way.spare and resized is not value:
                resized = torch.cat((resized, resized[..., -1:, :]), -2)
            table.put(resized)

    hook = grid.cut.register_forward_hook(interpolate)
    try:
        for owner, name, value in sizes:
            side = images.shape[-1] if isinstance(value, int) else type(value)(images.shape[-2:])
            setattr(owner, name, side)
        yield
    finally:
        hook.remove()
        for owner, name, value in sizes:
            setattr(owner, name, value)
        for table, value, ids in before:
            table.put(value)
            for (owner, name), buffer in zip(table.ids, ids, strict=True):
                owner._buffers[name] = buffer
