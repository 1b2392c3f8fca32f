"""A run's configuration from its file: presets by their names, keys of the command line, and what a name stands for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longstride.kernels import ConfigError, nearest
from longstride.launcher.config.json_file import load_json_object, parse_override, put
from longstride.launcher.config.run_config import RunConfig

DEEPSPEED_CONFIGS = Path(__file__).resolve().parents[2] / "ds_configs"
EXPERIMENTS = DEEPSPEED_CONFIGS / "experiments"


def find_config(text: str | Path) -> Path:
    """The file of a path, or of the bare name of one of ds_configs/experiments.

    Raises:
        ConfigError: a bare name that is neither. A path is checked by whoever reads it.
    """
    path = Path(text)
    if path.is_file() or len(path.parts) != 1 or path.suffix:
        return path
    known = sorted(file.stem for file in EXPERIMENTS.glob("*.json"))
    if path.name not in known:
        rule = f"no such file, and none of that name in ds_configs/experiments; {nearest(str(text), known)}"
        raise ConfigError(f"{text}: {rule}")
    return EXPERIMENTS / f"{path.name}.json"


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration in a file (see ``find_config``), with ``path.to.key=value`` overrides applied in order.

    Raises:
        ConfigError: every wrong field, one line each.
    """
    content = load_json_object(find_config(path))
    parsed = [parse_override(text) for text in overrides]
    # Steps on the command line replace a file's epochs, and epochs its steps. A null replaces nothing.
    train, given = content.get("train"), {".".join(parts): value for parts, value in parsed}
    for length, other in (("steps", "epochs"), ("epochs", "steps")):
        if isinstance(train, dict) and given.get(f"train.{length}") is not None and f"train.{other}" not in given:
            train.pop(other, None)
    for parts, value in parsed:
        # An override below a named DeepSpeed configuration changes a copy of what the name stands for.
        if parts[0] == "deepspeed" and len(parts) > 1:
            _resolve_deepspeed(content)
        put(content, parts, value)
    _resolve_deepspeed(content)
    config = RunConfig.model_validate(content)
    config.data.check_order()
    return config


def _resolve_deepspeed(content: dict[str, Any]) -> None:
    """Replaces the name of a DeepSpeed configuration by what it stands for, in place."""
    name = content.get("deepspeed")
    if not isinstance(name, str):
        return
    known = sorted(path.stem for path in DEEPSPEED_CONFIGS.glob("*.json"))
    if name not in known:
        raise ConfigError.at("deepspeed", name, f"no such file in ds_configs; {nearest(name, known)}")
    content["deepspeed"] = load_json_object(DEEPSPEED_CONFIGS / f"{name}.json")
