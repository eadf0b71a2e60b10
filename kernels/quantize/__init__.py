"""Activations to INT8 per token, alone or fused with what stands before a W8A8 linear.

    per token:       s_M = absmax / 127 of each row of x_MK, q_MK = round(x / s)
    after RMSNorm:   the same of w_K * x / sqrt(mean(x^2) + eps)
    after SwiGLU:    the same of silu(gate_MK) * up_MK

Fused, the row that is normalized or gated never goes to memory: INT8 and a scale do. Rounding is as
without fusion, in the places where a 16-bit model rounds. `reference.py` is the truth.
"""
