"""The example of docs/evict.md: plain transformers, and one line more."""

from importlib.resources import files

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvbench

name = str(files("kvbench.models") / "ref")  # or any folder or name on the hub
model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
prompts = [
    "<bos> chain 0 6 : a -> b 2 3 9 ; b -> c 4 2 0 ; c -> a 9 9 1 ; sum 1 8 9 ; start b ; do",
    "<bos> stack 0 2 : a 8 1 8 ; low 4 8 8 ; high 3 1 5 ; do",
]
inputs = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)

with kvbench.evict(model, policy="kvpop", budget=64) as eviction:
    output = model.generate(**inputs, max_new_tokens=100, do_sample=False)

print(*tokenizer.batch_decode(output), sep="\n")
print(eviction.tokens_seen, "tokens read a row")
print(eviction.positions[0].shape, "rows, KV heads and slots of the first layer")
print(eviction.bytes_held, "bytes held, whatever the length")
