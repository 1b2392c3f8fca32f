"""Configurations from JSON: unknown keys are errors, and every error names its path."""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_serializer
from typing_extensions import Self

from longstride.kernels import ConfigError, Problem, join_paths, nearest

Entry = TypeVar("Entry")


class StrictModel(BaseModel):
    """A frozen configuration object: unknown keys are errors and no value is converted from another type.

    A validator of a subclass that checks several fields raises ``ConfigError.at("field.below", value, rule)``. The path
    is relative to the object being validated and is completed here. Pydantic's strict mode accepts no list for a tuple:
    give tuple fields ``Field(strict=False)``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    # Newer fields: leaving them out at their default keeps saved configurations byte for byte as before.
    left_out_at_default: ClassVar[tuple[str, ...]] = ()

    @model_serializer(mode="wrap")
    def _without_later_defaults(self, serialize: Callable[[Self], dict[str, Any]]) -> dict[str, Any]:
        content = serialize(self)
        fields = type(self).model_fields
        left_out = [name for name in self.left_out_at_default if getattr(self, name) == fields[name].default]
        return {name: value for name, value in content.items() if name not in left_out}

    @classmethod
    def model_validate(cls, obj: Any) -> Self:  # type: ignore[override]
        """Parse the configuration in ``obj``, a dictionary from JSON.

        Raises:
            ConfigError: lists every wrong field, one line each.
        """
        try:
            return super().model_validate(obj)
        except ValidationError as error:
            # From None, as pydantic's text only repeats ours at length.
            raise config_error(cls, obj, error) from None


def parse_entries(
    path: str, value: Any, parse: Callable[[Any], Iterable[Entry]], most: int, owner: str
) -> tuple[Entry, ...]:
    """Parse an object, or each object of a list.

    Args:
        path: of the value.
        value: from JSON.
        parse: returns what an object describes.
        most: entries of a list, one for each ``owner``.

    Raises:
        ConfigError: the errors of all entries.
    """
    listed = isinstance(value, list)
    if listed and not 1 <= len(value) <= most:
        rule = f"must be a list of 1 to {most:,} objects, one for each {owner}; it has {len(value):,}"
        raise ConfigError(Problem(path, rule))
    entries: list[Entry] = []
    errors = []
    for number, entry in enumerate(value if listed else [value]):
        try:
            entries += parse(entry)
        except ConfigError as error:
            errors.append(error.under(f"{path}[{number}]" if listed else path))
    if errors:
        raise ConfigError.joined(errors)
    return tuple(entries)


def config_error(model: type[BaseModel], data: object, error: ValidationError) -> ConfigError:
    """Convert pydantic's errors about ``data`` to one error with a line for each wrong field."""
    by_path: dict[tuple[str, int], list[Problem]] = {}
    for number, detail in enumerate(error.errors(include_url=False)):
        for problem in _problems(model, data, detail):
            # A union reports one error for each member at the same path: join them to one problem.
            in_union = _follow(data, detail["loc"]).ends_in_member
            key = (problem.path, 0 if in_union else number + 1)
            by_path.setdefault(key, []).append(problem)
    problems = []
    for same_path in by_path.values():
        rules = list(dict.fromkeys(problem.rule for problem in same_path))
        problems.append(Problem(same_path[0].path, " or ".join(rules), same_path[0].value))
    return ConfigError(*problems)


def _problems(model: type[BaseModel], data: object, detail: Any) -> list[Problem]:
    """Convert one pydantic error."""
    path, value, _ = _follow(data, detail["loc"])
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "extra_forbidden":
        keys = _known_keys(model, detail["loc"][:-1])
        return [Problem(path, f"unknown key; {nearest(str(detail['loc'][-1]), keys)}")]
    if kind == "missing":
        last = detail["loc"][-1]
        place = f"{path}[{last}]" if isinstance(last, int) else join_paths(path, last)
        return [Problem(place, "required, and missing")]
    if kind == "union_tag_not_found":
        return [Problem(join_paths(path, context["discriminator"].strip("'")), "required, and missing")]
    if kind == "union_tag_invalid":
        tags = [tag.strip("'") for tag in context["expected_tags"].split(", ")]
        tag_path = join_paths(path, context["discriminator"].strip("'"))
        return [Problem(tag_path, f"is not known; {nearest(str(context['tag']), tags)}", context["tag"])]
    cause = context.get("error")
    if isinstance(cause, ConfigError):
        return list(cause.under(path).problems)
    if kind in ("model_type", "dict_type", "model_attributes_type"):
        return [Problem(path, "must be an object", value) if path else Problem("", "must be a JSON object")]
    rule = detail["msg"].removeprefix("Value error, ").replace("Input should be", "must be").replace("Input", "it")
    if kind == "finite_number":
        rule = "must be a finite number"
    # A value that is an object is left out, for a shorter message.
    return [Problem(path, rule) if isinstance(value, Mapping) else Problem(path, rule, value)]


class _Place(NamedTuple):
    """The part of the data that a pydantic location points to."""

    path: str
    value: object
    ends_in_member: bool  # the last part is no key of the data: it names a union member, or a missing key


def _follow(data: object, location: tuple[int | str, ...]) -> _Place:
    """Resolve a pydantic location, skipping the names of union members."""
    path, is_key = "", True
    for part in location:
        is_key = True
        if isinstance(data, Mapping) and part in data:
            path, data = join_paths(path, str(part)), data[part]
        elif isinstance(part, int) and isinstance(data, Sequence) and not isinstance(data, str) and part < len(data):
            path, data = f"{path}[{part}]", data[part]
        else:
            is_key = False
    return _Place(path, data, not is_key)


def _known_keys(model: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    """List the keys that the object at ``location`` may have."""
    candidates = [model]
    for part in location:
        fields = [candidate.model_fields[part] for candidate in candidates if part in candidate.model_fields]
        if fields:
            candidates = [model for field in fields for model in _models_in(field.annotation)]
        else:  # a list position, or a union member's name: the class, or a literal that distinguishes the members
            members = [model for model in candidates if part == model.__name__ or part in _literals_of(model)]
            candidates = members or candidates
    return list(dict.fromkeys(key for candidate in candidates for key in candidate.model_fields))


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    """List every configuration class named in an annotation such as ``list[A | B] | None``."""
    if arguments := typing.get_args(annotation):  # first: for Python 3.10 list[int] is a class
        return [model for argument in arguments for model in _models_in(argument)]
    return [annotation] if isinstance(annotation, type) and issubclass(annotation, BaseModel) else []


def _literals_of(model: type[BaseModel]) -> list[Any]:
    return [value for field in model.model_fields.values() for value in typing.get_args(field.annotation)]
