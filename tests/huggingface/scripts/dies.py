"""Rank 1 is killed in the middle of training, as the system does it when memory runs out."""

import os
import signal

import torch
from accelerate import Accelerator

accelerator = Accelerator()
model, optimizer = accelerator.prepare(*(lambda m: (m, torch.optim.SGD(m.parameters(), lr=0.1)))(torch.nn.Linear(8, 8)))
for step in range(1000):
    if step == 3 and accelerator.process_index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    accelerator.backward(model(torch.ones(2, 8)).sum())
    optimizer.step()
    optimizer.zero_grad()
