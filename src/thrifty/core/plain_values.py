"""Strict conversion between typed values and plain data. Errors name the path and the nearest valid name.

The conversion covers frozen dataclasses with fields of bool, int, float, str, optional types, tuples, literals and
dataclasses. Recipes and techniques consist of such dataclasses.
"""

import dataclasses
import re
import tomllib
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union

from thrifty.core.errors import UsageError, did_you_mean
from thrifty.core.old_names import new_key
from thrifty.core.peer_names import peer_option
from thrifty.core.setting_bounds import check_plain, hints_of

T = TypeVar("T")
DEEPEST = 16
"""Maximum depth of nested tables and lists."""
LONGEST_KEY = 100
"""Maximum number of dots in a key, because reading a key takes time quadratic in its parts."""

NO_DATA = {"no data": True}
"""Metadata of a field that plain data never contains."""
_SECONDS = {
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1),
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), 60),
    **dict.fromkeys(("h", "hr", "hrs", "hour", "hours"), 3600),
}
_TOO_DEEP = f"tables or lists are nested deeper than {DEEPEST} levels"


def parse_toml(text: str, name: str) -> dict[str, Any]:
    """Return the tables of a user's TOML text; `name` is the name of its file or option. Raise TOMLDecodeError for
    invalid TOML, UsageError for values that no setting can have (see `check_plain`)."""
    try:
        if any(key.count(".") > LONGEST_KEY for line in text.splitlines() for key in _keys(line)):
            raise RecursionError
        tables = tomllib.loads(text)
        _check_tree(tables, name, "", DEEPEST)
    except tomllib.TOMLDecodeError:
        raise
    except RecursionError:
        raise UsageError(f"{name}: {_TOO_DEEP}", fix=f"nest at most {DEEPEST} levels") from None
    except ValueError as error:  # Python reads integers of up to 4,300 digits
        raise UsageError(f"{name}: {error}", fix="use a smaller number") from None
    return tables


def _keys(line: str) -> list[str]:
    return [line] if line.lstrip().startswith("[") else line.split("=")[:-1]


def _check_tree(value: Any, name: str, path: str, depth: int) -> None:
    if depth == 0:
        raise UsageError(f"{name}: {_TOO_DEEP}", fix=f"nest at most {DEEPEST} levels")
    inner = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        here = _join(path, str(key))
        check_plain(key, f"{name}: a key")
        if isinstance(item, Mapping | list):
            _check_tree(item, name, here, depth - 1)
        else:
            check_plain(item, f"{name}: {here[:80]}")


def build(kind: type[T], data: Mapping[str, Any], path: str = "", base: T | None = None) -> T:
    """Return a dataclass built from a table. With `base`, the table has only the fields that differ from `base`. Raise
    UsageError with the path of the first invalid value."""
    if not isinstance(data, Mapping):
        raise UsageError(f"{path} must be a table, not {data!r}", fix=f"write [{path}] and its keys below")
    hints = hints_of(kind)
    names = [field.name for field in _data_fields(kind)]
    for key in data:
        if key not in names:
            near = did_you_mean(new_key(_join(path, key)), names)
            raise UsageError(f"unknown key {_join(path, key)!r}", fix=peer_option(key) or near)
    try:
        values = {
            key: convert(hints[key], value, _join(path, key), getattr(base, key, None)) for key, value in data.items()
        }
        return kind(**values) if base is None else dataclasses.replace(base, **values)  # type: ignore[type-var]
    except TypeError as error:
        raise UsageError(f"{path or kind.__name__}: {error}") from None


def convert(kind: Any, value: Any, path: str, base: Any = None) -> Any:
    """Return a value converted to the type of its field. An int may become a float; no other type changes. A table is
    merged into the dataclass `base`, if `base` is passed."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return convert(arguments[0], value, path, base)
    if origin in (Union, types.UnionType):
        for option in arguments:
            if option is not types.NoneType and _fits(option, value):
                return convert(option, value, path, base)
        kinds = [option for option in arguments if option is not types.NoneType]
        wanted = " or ".join(map(_name, kinds))
        raise UsageError(f"{path} must be {wanted}, not {value!r}", fix=_example(kinds[0], path))
    if origin is Literal:
        if value not in arguments:
            raise UsageError(f"{path} is {value!r}", fix=did_you_mean(str(value), map(str, arguments)))
        return value
    if origin is tuple:
        return _convert_tuple(arguments, value, path)
    if dataclasses.is_dataclass(kind):
        return build(kind, value, path, base)  # type: ignore[type-var]
    if origin is Mapping:
        if not isinstance(value, Mapping):
            raise UsageError(f"{path} must be a table, not {value!r}", fix=_example(kind, path))
        return dict(base or {}) | {key: convert(arguments[1], item, _join(path, key)) for key, item in value.items()}
    if not _fits(kind, value):
        raise UsageError(f"{path} must be {_name(kind)}, not {value!r}", fix=_example(kind, path))
    return float(value) if kind is float else value


def _convert_tuple(arguments: tuple, value: Any, path: str) -> tuple:
    if not isinstance(value, list | tuple):
        raise UsageError(f"{path} must be a list, not {value!r}", fix=f"write {path} = [{value!r}]")
    if arguments[-1] is Ellipsis:
        arguments = (arguments[0],) * len(value)
    if len(arguments) != len(value):
        fix = f"for example {path} = [{', '.join(_EXAMPLE.get(each, '…') for each in arguments)}]"
        raise UsageError(f"{path} must have {len(arguments)} entries, not {len(value)}", fix)
    pairs = enumerate(zip(arguments, value, strict=True))
    return tuple(convert(kind, item, f"{path}[{index}]") for index, (kind, item) in pairs)


def _fits(kind: Any, value: Any) -> bool:
    if kind in (int, float) and isinstance(value, bool):
        return False
    if dataclasses.is_dataclass(kind):
        return isinstance(value, Mapping)
    origin = typing.get_origin(kind)
    if origin in (Mapping, tuple):
        return isinstance(value, Mapping if origin is Mapping else list | tuple)
    return isinstance(value, (int, float) if kind is float else kind)


_EXAMPLE = {int: "10", float: "0.1", bool: "true", str: '"text"'}


def _name(kind: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return names.get(kind) or {Mapping: "a table", tuple: "a list"}.get(typing.get_origin(kind) or kind, str(kind))


def _example(kind: Any, path: str) -> str:
    return f"for example {path} = {_EXAMPLE[kind]}" if kind in _EXAMPLE else f"write [{path}] and its keys below"


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def to_data(value: Any) -> dict[str, Any]:
    """Return a dataclass as a table of plain data, without fields that are None."""
    return {
        field.name: _plain(getattr(value, field.name))
        for field in _data_fields(value)
        if getattr(value, field.name) is not None
    }


def _data_fields(value: Any) -> list[dataclasses.Field]:
    return [field for field in dataclasses.fields(value) if field.init and not field.metadata.get("no data")]


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return to_data(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def differences(old: Mapping[str, Any], new: Mapping[str, Any], path: str = "") -> list[str]:
    """Return the differences between two tables, one line per value: `data.batch: 32 → 16`."""
    lines = []
    for key in sorted(old.keys() | new.keys()):
        here, before, after = _join(path, key), old.get(key), new.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            lines += differences(before, after, here)
        elif before != after:
            lines.append(f"{here}: {_shown(before)} → {_shown(after)}")
    return lines


def _shown(value: Any) -> str:
    return "absent" if value is None else "present" if isinstance(value, Mapping) else repr(value)


def write_size(size: float) -> str:
    """Return bytes with three digits: 1234567 as "1.23 MB"."""
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= 0.9995 * factor:
            amount = size / factor
            return f"{amount:,.{0 if amount >= 99.95 else 1 if amount >= 9.995 else 2}f} {unit}"
    return f"{size:.0f} B"


def read_size(text: str, option: str = "--memory") -> float:
    """Return a size such as `400MB`, `16GiB` or `4e8` in bytes. Raise UsageError, with the option, for other text."""
    match = re.fullmatch(r"\s*([0-9]+\.?[0-9]*(?:e[0-9]+)?)\s*([kmgt]?)(i?)b?\s*", text.lower())
    size = float(match[1]) * (1024 if match[3] else 1000) ** " kmgt".index(match[2] or " ") if match else 0.0
    if size <= 0:
        raise UsageError(f"{option} {text!r} is not a size", fix="for example 400MB, 16GB or 16GiB")
    assert match
    if not match[2] and size < 1e6:
        raise UsageError(f"{option} {text!r} is {write_size(size)}", fix=f"name the unit: {option} {match[1]}GB")
    return size


def read_budget(text: str, option: str = "--budget") -> dict[str, float]:
    """Return a budget such as `500steps`, `1e7 tokens`, `3 epochs`, `90s`, `10min` or `2h` as the recipe's budget
    table. Raise UsageError, with the option's name, for any other text."""
    match = re.fullmatch(r"\s*([0-9][0-9_]*\.?[0-9]*(?:e[0-9]+)?)\s*([a-z]*)\s*", text.lower())
    number, unit = (float(match[1]), match[2]) if match else (0.0, "")
    if unit in ("step", "steps") and number.is_integer():
        return {"steps": int(number)}
    if unit in ("token", "tokens"):
        return {"tokens": number}
    if unit in ("epoch", "epochs"):
        return {"epochs": number}
    if unit in _SECONDS:
        return {"seconds": number * _SECONDS[unit]}
    near = f"--budget {number:g}steps, or " if match and not unit else ""
    raise UsageError(
        f"{option} {text!r} is not an amount", fix=f"{near}for example 500steps, 1e7tokens, 3epochs, 90s, 10min or 2h"
    )


def read_extension(text: str, option: str = "--budget") -> dict[str, float]:
    """Return an extension of a budget, such as `+10min`, as a budget table. Raise UsageError for any other text."""
    if not text.strip().startswith("+"):
        raise UsageError(
            f"{option} {text!r} is not an extension of the budget", fix=f"{option} +{text.replace(' ', '')}"
        )
    return read_budget(text.strip()[1:], option)
