"""Triton kernels, each beside the plain torch form of the same function.

Every module can be imported without Triton and without a GPU; :func:`helios.kernels.common.available` says
whether the kernels can run on a device. A function and its ``*_reference`` take the same arguments and
mean the same; the tests hold them against each other, on the CPU through Triton's interpreter.
"""
