# SPDX-License-Identifier: Apache-2.0
"""A captured training step, replayed: torch.cuda.CUDAGraph with dropout, momentum and inputs that change in every step."""

import torch
from common import Digest, Steps, check, device, options, seed


def main() -> None:
    o = options(__doc__)
    seed(5)
    where = device()
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Dropout(0.3), torch.nn.Linear(64, 4)
    ).to(where)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, capturable=True)
    x, y = torch.zeros(8, 16, device=where), torch.zeros(8, 4, device=where)

    def step() -> torch.Tensor:
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            optimizer.zero_grad(set_to_none=True)
            step()
    torch.cuda.current_stream().wait_stream(side)
    optimizer.zero_grad(set_to_none=True)
    graph, forward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    with torch.no_grad(), torch.cuda.graph(forward, pool=graph.pool()):
        result = torch.nn.functional.dropout(x @ model[0].weight.t(), 0.5)
    drawn, losses = [], []
    open_for, captured = torch.cuda.CUDAGraph(), torch.zeros(1, device=where)
    steps = Steps(o)
    for number in steps:
        x.copy_(torch.randn(8, 16))
        y.copy_(torch.randn(8, 4))
        # Several in a row, so that a cut finds launches that have not run.
        for _ in range(20):
            graph.replay()
            forward.replay()
            losses.append(loss.detach().clone())
        drawn.append(result.clone())
        eager = [torch.full((50,), float(i), device=where) for i in range(5)]
        check(all(bool((t == i).all()) for i, t in enumerate(eager)), "a graph wrote into memory")
        # A capture that stays open over two steps of three.
        with torch.cuda.stream(side):
            if number % 3 == 1:
                open_for.capture_begin(capture_error_mode="relaxed")
                captured = torch.rand(100, device=where) + number
            elif number % 3 == 2:
                captured = captured * x.sum()
            else:
                open_for.capture_end()
                side.wait_stream(torch.cuda.default_stream())
                open_for.replay()
                drawn.append(captured.cpu())
                open_for.reset()
        steps.say(f"{float(loss):.9f}")
    digest = Digest()
    digest.add("losses", losses)
    digest.add("drawn", drawn)
    digest.add("model", model.state_dict())
    digest.add("optimizer", optimizer.state_dict())
    digest.add_random_states()
    digest.finish()


if __name__ == "__main__":
    main()
