"""The benchmark of photographs: its crops are split by place and its patterns are valid."""

import numpy as np
import pytest

from benchmarks import photographs
from benchmarks.recipe import preset
from longstride.sparse_model import ModelConfig


def test_crops_for_training_and_those_held_out_share_no_pixel(monkeypatch: pytest.MonkeyPatch) -> None:
    height, width = 40, 8 * 40
    row, column, mark = np.arange(height)[:, None], np.arange(width), np.full((height, width), 7)
    photo = np.stack(np.broadcast_arrays(row, column // 2, mark), axis=-1).astype(np.uint8)
    monkeypatch.setattr(photographs, "photographs", lambda: [photo])
    border = width * 7 // 8 // 2  # of the halved columns
    for seed in range(20):
        for held_out in (False, True):
            tokens, scored = photographs.crop(np.random.default_rng(seed), 3_072, held_out)
            crop = tokens.reshape(32, 32, 3)
            assert (crop[:, :, 1] >= border).all() == (crop[:, :, 1] >= border).any() == held_out
            assert (np.diff(crop[:, 0, 0].astype(int)) == 1).all()
            assert (crop[..., 2] == 7).all() and scored.all()


@pytest.mark.parametrize("name", photographs.PATTERNS)
def test_every_pattern_is_valid_for_the_preset(name: str) -> None:
    model = preset("pictures_miniature")["model"]
    assert ModelConfig.model_validate(model | {"attention": photographs.PATTERNS[name]}).context == 3_072
