# SPDX-License-Identifier: Apache-2.0
"""Sparse tensors: a graph convolution over a COO adjacency, kept from step to step, and embeddings with sparse gradients
under SparseAdam."""

import torch
from common import Digest, Steps, device, options, seed
from torch import nn
from torch.nn import functional as F

NODES, CLASSES, WIDTH, WORDS = 60, 4, 16, 500


class GCN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x, adjacency):
        x = F.relu(torch.sparse.mm(adjacency, self.first(x)))
        return torch.spmm(adjacency, self.second(F.dropout(x, 0.5, self.training)))


def adjacency() -> torch.Tensor:
    """Normalized rows of a random graph, with itself."""
    edges = torch.randint(0, NODES, (2, 4 * NODES))
    edges = torch.cat([edges, edges.flip(0), torch.arange(NODES).repeat(2, 1)], 1)
    dense = torch.zeros(NODES, NODES).index_put_((edges[0], edges[1]), torch.ones(()))
    return (dense / dense.sum(1, keepdim=True)).to_sparse()


def main() -> None:
    o = options(__doc__)
    seed(1)
    where = device()
    graph = adjacency().to(where)
    table = nn.Embedding(WORDS, WIDTH, sparse=True).to(where)
    model = GCN().to(where)
    optimizers = [
        torch.optim.SparseAdam(table.parameters(), lr=0.01),
        torch.optim.Adam(model.parameters(), lr=0.01),
    ]
    classes = torch.randint(0, CLASSES, (NODES,)).to(where)
    seen = torch.sparse_coo_tensor(size=(WORDS, WIDTH), device=where)  # grows and is coalesced
    losses = []
    steps = Steps(o)
    for step in steps:
        words = torch.randint(0, WORDS, (NODES,)).to(where)
        loss = F.cross_entropy(model(table(words), graph), classes)
        for one in optimizers:
            one.zero_grad()
        loss.backward()
        seen = (seen + table.weight.grad).coalesce() if step % 3 else seen + table.weight.grad
        for one in optimizers:
            one.step()
        losses.append(loss.item())
        steps.say(f"loss {losses[-1]:.8f} seen {seen._nnz()}")
    digest = Digest()
    digest.add("model", model.state_dict())
    digest.add("table", table.state_dict())
    digest.add("optimizers", [one.state_dict() for one in optimizers])
    seen = seen.coalesce()
    digest.add("seen", [seen.indices(), seen.values(), graph.indices(), graph.values()])
    digest.add("losses", losses)
    digest.add_random_states()
    digest.finish()


if __name__ == "__main__":
    main()
