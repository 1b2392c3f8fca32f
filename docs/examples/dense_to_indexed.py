"""Turn a dense Llama sparse: train it, add indexers, train these alone, then all weights with few keys."""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from longstride.hub import add_indexers, sum_indexer_losses

torch.manual_seed(0)
text = torch.tensor(list(Path(argparse.__file__).read_bytes()))
train, test = text[:-8192], text[-8192:].view(-1, 256)
config = LlamaConfig(vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4)
model = AutoModelForCausalLM.from_config(config)


def fit(loss, steps, rate):
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], rate)
    for _ in range(steps):
        begins = torch.randint(len(train) - 256, (4, 1))
        loss(train[begins + torch.arange(256)]).backward()
        optimizer.step()
        optimizer.zero_grad()


def show(name):
    with torch.no_grad():
        print(name, f"{model.eval()(test, labels=test).loss / 0.6931:.2f}")
    model.train()


def indexer_loss(tokens):
    model(tokens)
    return sum_indexer_losses(model)


fit(lambda tokens: model(tokens, labels=tokens).loss, 100, 3e-3)
show("dense")
add_indexers(model, keys=16)
show("16 keys, new indexers")

model.config.longstride_indexer["keys"] = 256  # dense: the loss is over all keys
for name, weight in model.named_parameters():
    weight.requires_grad_(".indexer." in name)
fit(indexer_loss, 50, 1e-2)
model.config.longstride_indexer["keys"] = 16
show("16 keys, trained indexers")

model.requires_grad_(True)
fit(lambda tokens: model(tokens, labels=tokens).loss + sum_indexer_losses(model), 50, 1e-3)
show("16 keys, trained model")
