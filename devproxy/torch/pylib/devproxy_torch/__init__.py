# SPDX-License-Identifier: Apache-2.0
"""Makes torch, of the CPU wheel or the CUDA wheel, a CUDA build over the CUDA driver API of the preloaded libcuda.so.1.

Begin with boot, which says when that is done; hooks lists what is done to which module of torch. A job's process loads boot
alone until it imports torch.
"""
