"""Torch definitions of the operations of one decode step; the Triton kernels equal them.

Shapes: ``bs`` requests, ``w`` block positions (anchor included), ``V`` vocabulary entries, ``T`` tokens, ``L`` drafter
layers, ``R`` rows of requests. No function synchronises with the device.
"""
