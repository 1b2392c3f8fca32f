"""transformers' common tests of models, applied to ours; tests/clients/test_common_models.py runs this file.

That test extracts ``transformers_tests`` from the source package of transformers.
"""

import re
import unittest

import torch
from transformers_tests.test_modeling_common import ModelTesterMixin, ids_tensor

from longstride.launcher.hub import LongstrideConfig, LongstrideForCausalLM

# Why a test says nothing about this model, and the beginnings of such tests' names.
NOT_APPLICABLE = {
    "attention by blocks returns no weights, and is no function of transformers that could be exchanged": [
        "attention_outputs", "attn_implementation", "can_set_attention", "eager_matches", "flash_attn",
        "flex_attention", "sdpa_can", "sliding_window_mask",
    ],
    "its blocks are none of transformers' own layers; tests/clients/test_trainer.py holds that gradients are equal": [
        "gradient_checkpointing_enable_disable", "training_gradient_checkpointing",
        "enable_input_require_grads_with_gradient_checkpointing",
    ],
    "states are recorded by the model itself, not by hooks of transformers": [
        "can_capture_specific", "capture_outputs", "moe_models_record", "output_router_logits",
    ],
    "the model has no base model under a head: tensors have the names of an export": ["model_base_model", "torch_save"],
    "special tokens need no weights, and a vocabulary is trained": ["resize_tokens_emb", "resize_embeddings_untied"],
    "the new model's logits are all equal, whatever the labels; tests/clients/test_trainer.py holds `shift_labels`": [
        "causal_lm_loss_honors",
    ],
    "the source package has no common tests of generate; tests/clients/test_generate.py holds ours": [
        "generation_tester",
    ],
    "a cache of transformers is refused; tests/clients/test_hub_model.py holds both names of ours": ["bc_cache_name"],
    "position tables and rotary positions are of the context that was trained": ["resize_position", "model_rope"],
    "is for models of several parts, encoders, pictures, sounds": [
        "encoder_decoder", "get_audio", "get_image", "get_text", "get_video", "internal_model_config",
        "multimodal_outputs", "vision_axial",
    ],
    "names of tensors are not converted, nor cut by a plan": [
        "can_load_from_already_mapped", "reverse_loading", "tied_head_has", "tp_plan",
    ],
    "this configuration has no buffers; tests/clients/test_saved.py holds that they stay in fp32": ["keep_in_fp32"],
    "needs a card, or several": [
        "can_load_with_device", "can_load_with_global", "cpu_offload", "disk_offload", "model_parallelism",
        "kernels_can_load",
    ],
    "compiles the whole as one graph, which cannot look at a batch's padding": ["torch_compile_for_training"],
}  # fmt: skip


class Tester:
    """Configurations and inputs for the common tests."""

    __test__ = False
    batch_size, seq_length, is_training = 3, 7, True
    num_hidden_layers, hidden_size, num_attention_heads, vocab_size = 2, 32, 2, 99

    def get_config(self) -> LongstrideConfig:
        return LongstrideConfig(
            model={
                "context": 32, "layers": 2, "heads": 2, "width": 32, "vocabulary": self.vocab_size,
                "attention": {"type": "strided", "stride": 8}, "embedding": {"type": "text", "row_width": 8},
            }
        )  # fmt: skip

    def prepare_config_and_inputs_for_common(self) -> tuple[LongstrideConfig, dict[str, torch.Tensor]]:
        tokens = ids_tensor([self.batch_size, self.seq_length], self.vocab_size)
        return self.get_config(), {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


class CommonModelTest(ModelTesterMixin, unittest.TestCase):
    """All common tests. A test that skips itself is a failure of the test that runs this file."""

    all_model_classes = (LongstrideForCausalLM,)
    has_attentions = False
    test_can_init_all_missing_weights_before_2023 = True

    def setUp(self) -> None:
        self.model_tester = Tester()
        LongstrideForCausalLM(self.model_tester.get_config())  # tells transformers' tables of it


for name in [name for name in dir(CommonModelTest) if callable(getattr(CommonModelTest, name))]:
    for reason, beginnings in NOT_APPLICABLE.items():
        if re.match(f"test_({'|'.join(beginnings)})", name):
            setattr(CommonModelTest, name, unittest.skip(reason)(lambda self: None))
