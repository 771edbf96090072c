"""GPU workers without a GPU: a device whose memory is apart for torch, and a process group that carries nothing else.

On CPU workers a tensor that lies in the wrong memory goes unnoticed, since there is one memory alone. Here torch gets
a device of its own (`device.cpp`, compiled once and kept) that computes with the kernels of the CPU, and refuses
tensors of the CPU among its own as CUDA does. `group.py` stands for NCCL, by gloo. A command whose `PYTHONPATH` has
this folder (`sitecustomize.py`) sees eight such GPUs; the rest is as users run it. Real are all numbers, messages and
decisions of ddpexp that ask for the CPU or another device; not shown is what asks for CUDA by its name: pinned
memory, its streams, its random numbers.
"""
