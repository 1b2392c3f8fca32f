"""One rank of Trainers of transformers that train an export under DeepSpeed, under ZeRO 0 and 3: FOLDER OUTPUT."""

import sys
from pathlib import Path

import torch
from accelerate.state import AcceleratorState
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

from longstride.launcher.hub import register
from longstride.launcher.ranks import leave

folder, output = Path(sys.argv[1]), Path(sys.argv[2])
register()
for weights, stage in (("loaded", 0), ("loaded", 3), ("new", 0), ("new", 3)):
    AcceleratorState._reset_state(reset_partial_state=True)
    zero = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True}
    batch = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    arguments = TrainingArguments(
        output_dir=str(output / f"{weights}-{stage}"), per_device_train_batch_size=2, gradient_accumulation_steps=2,
        max_steps=2, learning_rate=0.1, lr_scheduler_type="constant", optim="sgd", save_strategy="no", report_to=[],
        use_cpu=True, disable_tqdm=True, deepspeed={**batch, "gradient_clipping": "auto", "zero_optimization": zero},
    )  # fmt: skip
    torch.manual_seed(0)
    if weights == "new":
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    else:
        model = AutoModelForCausalLM.from_pretrained(folder)
    assert all(hasattr(parameter, "ds_id") for parameter in model.parameters()) == (stage == 3)
    rows = torch.randint(256, (16, 40), generator=torch.Generator().manual_seed(1))
    trainer = Trainer(model=model, args=arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows])
    trainer.train()
    trainer.save_model(arguments.output_dir)
torch.distributed.destroy_process_group()
# DeepSpeed keeps its groups, so gloo's threads outlive them. Destructors of C++ may meet these and abort the process.
leave(0)
