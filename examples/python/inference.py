"""Ten lines with PyGraph: compile, call, look inside.

python examples/python/inference.py
"""

import torch

import pygraph

device = "cuda" if torch.cuda.is_available() else "cpu"
layers = [torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10)]
model = torch.compile(torch.nn.Sequential(*layers).to(device), backend="pygraph")

with torch.no_grad():
    results = [model(torch.randn(32, 256, device=device)) for _ in range(100)]
print(len(results), "results, all valid:", len({r.data_ptr() for r in results}), "addresses")

for graph in pygraph.stats():
    print(graph)
