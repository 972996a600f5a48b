# SPDX-License-Identifier: Apache-2.0
"""In the shape of a word language model: truncated back-propagation through an LSTM, clipping, an annealed rate, a file
of the best weights."""

import math
import time

import torch
from torch import nn

torch.manual_seed(1111)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WORDS, BATCH, BPTT = 200, 8, 16


def batchify(data: torch.Tensor) -> torch.Tensor:
    return data[: len(data) // BATCH * BATCH].view(BATCH, -1).t().contiguous().to(device)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.drop = nn.Embedding(WORDS, 32), nn.Dropout(0.2)
        self.rnn = nn.LSTM(32, 32, 2, dropout=0.2)
        self.decoder = nn.Linear(32, WORDS)
        self.decoder.weight = self.encoder.weight

    def forward(self, x, hidden):
        output, hidden = self.rnn(self.drop(self.encoder(x)), hidden)
        return nn.functional.log_softmax(self.decoder(self.drop(output)).view(-1, WORDS), 1), hidden


text = (torch.arange(12000) * 7 % 11 + torch.randint(0, 180, (12000,))) % WORDS
train_data, val_data = batchify(text[:10000]), batchify(text[10000:])
model, criterion, rate, best = Model().to(device), nn.NLLLoss(), 5.0, math.inf


def zero_state():
    return tuple(torch.zeros(2, BATCH, 32, device=device) for _ in range(2))


def evaluate() -> float:
    model.eval()
    total, hidden = 0.0, zero_state()
    with torch.no_grad():
        for i in range(0, len(val_data) - 1, BPTT):
            n = min(BPTT, len(val_data) - 1 - i)
            output, hidden = model(val_data[i : i + n], hidden)
            total += n * criterion(output, val_data[i + 1 : i + 1 + n].reshape(-1)).item()
    return total / (len(val_data) - 1)


for epoch in range(1, 4):
    model.train()
    begin, total, hidden = time.time(), 0.0, zero_state()
    for batch, i in enumerate(range(0, len(train_data) - 1, BPTT)):
        n = min(BPTT, len(train_data) - 1 - i)
        model.zero_grad()
        hidden = tuple(h.detach() for h in hidden)
        output, hidden = model(train_data[i : i + n], hidden)
        loss = criterion(output, train_data[i + 1 : i + 1 + n].reshape(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-rate)
        total += loss.item()
        time.sleep(0.01)  # a bigger model
        if batch % 10 == 9:
            ms = (time.time() - begin) * 100
            print(f"epoch {epoch} | {batch} batches | ms/batch {ms:5.2f} | loss {total / 10:.6f}")
            total, begin = 0.0, time.time()
    loss = evaluate()
    print(f"end of epoch {epoch} | valid loss {loss:.6f} | valid ppl {math.exp(loss):.4f}")
    if loss < best:
        best = loss
        with open("model.pt", "wb") as file:
            torch.save(model, file)
    else:
        rate /= 4.0
with open("model.pt", "rb") as file:
    model = torch.load(file, weights_only=False)
print(f"End of training | test loss {evaluate():.6f}")
