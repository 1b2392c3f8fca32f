"""The `license` field of a model card, as Hugging Face's hub reads it."""

from __future__ import annotations

import difflib

from longstride.kernels import ConfigError

# https://huggingface.co/docs/hub/repositories-licenses names those that the hub knows.
KNOWN = (
    "afl-3.0", "agpl-3.0", "apache-2.0", "apple-amlr", "apple-ascl", "artistic-2.0", "bigcode-openrail-m",
    "bigscience-bloom-rail-1.0", "bigscience-openrail-m", "bsd", "bsd-2-clause", "bsd-3-clause",
    "bsd-3-clause-clear", "bsl-1.0", "c-uda", "cc", "cc-by-2.0", "cc-by-2.5", "cc-by-3.0", "cc-by-4.0",
    "cc-by-nc-2.0", "cc-by-nc-3.0", "cc-by-nc-4.0", "cc-by-nc-nd-3.0", "cc-by-nc-nd-4.0", "cc-by-nc-sa-2.0",
    "cc-by-nc-sa-3.0", "cc-by-nc-sa-4.0", "cc-by-nd-4.0", "cc-by-sa-3.0", "cc-by-sa-4.0", "cc0-1.0",
    "cdla-permissive-1.0", "cdla-permissive-2.0", "cdla-sharing-1.0", "creativeml-openrail-m",
    "deepfloyd-if-license", "ecl-2.0", "epl-1.0", "epl-2.0", "etalab-2.0", "eupl-1.1", "eupl-1.2",
    "fair-noncommercial-research-license", "gemma", "gfdl", "gpl", "gpl-2.0", "gpl-3.0", "h-research",
    "intel-research", "isc", "lgpl", "lgpl-2.1", "lgpl-3.0", "lgpl-lr", "llama2", "llama3", "llama3.1", "llama3.2",
    "llama3.3", "llama4", "lppl-1.3c", "mit", "mpl-2.0", "ms-pl", "ncsa", "odbl", "odc-by", "ofl-1.1", "openrail",
    "openrail++", "osl-3.0", "pddl", "postgresql", "unknown", "unlicense", "wtfpl", "zlib",
)  # fmt: skip
_OTHER = "other:"


def license_fields(text: str) -> dict[str, str]:
    """The card's fields of a license: an identifier of the hub, or `other:NAME` for one that it does not know.

    Raises:
        ConfigError: it is neither.
    """
    name = text.removeprefix(_OTHER)
    if name != text and name.isprintable() and name.strip() == name != "":
        return {"license": "other", "license_name": name}
    if text not in KNOWN:
        near = difflib.get_close_matches(text.lower(), KNOWN, 1)
        nearest = _OTHER + (name if name not in ("", "other") else "NAME")
        rule = f"must be an identifier of Hugging Face's hub, or {_OTHER}NAME"
        raise ConfigError(f"--license={text}: {rule}; nearest {near[0] if near else nearest}")
    return {"license": text}
