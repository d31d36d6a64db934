"""Attention libraries that need a GPU, as functions of the same schema and conventions, written in plain PyTorch."""

import inspect
import sys
from types import ModuleType

import torch
import torch.nn.functional as F

from vitfast.kernels.libraries import attention as libraries

# Parameters of flash-attn-3 (hopper/flash_attn_interface.py, custom operations since September 2025) and flash-attn-4
# (flash_attn/cute/interface.py, 4.0.0b36); "name=" has a default.
SIGNATURES = {
    "_flash_attn_forward": """
        q k v k_new= v_new= qv= out_= cu_seqlens_q= cu_seqlens_k= cu_seqlens_k_new= seqused_q= seqused_k= max_seqlen_q=
        max_seqlen_k= page_table= kv_batch_idx= leftpad_k= rotary_cos= rotary_sin= seqlens_rotary= q_descale= k_descale=
        v_descale= softmax_scale= causal= window_size_left= window_size_right= attention_chunk= softcap=
        rotary_interleaved= scheduler_metadata= num_splits= pack_gqa= sm_margin=""",
    "_flash_attn_backward": """
        dout q k v out softmax_lse cu_seqlens_q= cu_seqlens_k= sequed_q= sequed_k= max_seqlen_q= max_seqlen_k= dq= dk=
        dv= softmax_scale= is_causal= window_size_left= window_size_right= softcap= deterministic= sm_margin=""",
    "_flash_attn_fwd": """
        q k v qv= cu_seqlens_q= cu_seqlens_k= seqused_q= seqused_k= max_seqlen_q= max_seqlen_k= min_seqlen_k=
        page_table= softmax_scale= causal= softcap= window_size_left= window_size_right= learnable_sink= tile_mn=
        mma_pv_is_rs= intra_wg_overlap= num_threads= num_splits= pack_gqa= _arch= score_mod= mask_mod=
        block_sparse_tensors= return_lse= out= lse= aux_tensors= aux_scalars= q_descale= k_descale= v_descale=
        gather_kv_indices= scheduler_metadata= seqlen_k_per_split= disable_scheduler_metadata=
        gather_bwd_recompute_p=""",
    "_flash_attn_bwd": """
        q k v out dout lse softmax_scale= causal= softcap= window_size_left= window_size_right= m_block_size=
        n_block_size= num_threads= pack_gqa= num_stages_Q= num_stages_dO= SdP_swapAB= dKV_swapAB= dQ_swapAB=
        AtomLayoutMSdP= AtomLayoutNdKV= AtomLayoutMdQ= V_in_regs= cu_seqlens_q= cu_seqlens_k= seqused_q= seqused_k=
        max_seqlen_q= max_seqlen_k= deterministic= dq= dk= dv= score_mod= score_mod_bwd= mask_mod= aux_tensors=
        aux_scalars= block_sparse_tensors= dlse= learnable_sink=""",
}


def plain_forward(q, k, v, scale):
    """(B, H, N, Dh) -> o in q's dtype and lse (B, H, N), natural logarithm."""
    s = q.double() @ k.double().mT * scale
    return (s.softmax(-1) @ v.double()).to(q.dtype), s.logsumexp(-1).float()


def plain_backward(q, k, v, o, lse, do, scale):
    """dq, dk, dv (B, H, N, Dh) as a flash backward makes them: from o and lse, which must be right."""
    q, k, v, o, lse, do = (t.double() for t in (q, k, v, o, lse, do))
    p = (q @ k.mT * scale - lse[..., None]).exp()
    ds = p * (do @ v.mT - (o * do).sum(-1, keepdim=True)) * scale
    return ds @ k, ds.mT @ q, p.mT @ do


def package_function(name, called):
    """The package's function of that name; it notes that it was called."""
    words = (word + "None" if word.endswith("=") else word for word in SIGNATURES[name].split())
    signature = inspect.signature(eval(f"lambda {', '.join(words)}: None"))

    def function(*args, **kwargs):
        call = signature.bind(*args, **kwargs).arguments
        called.append(name)
        assert not call.get("causal", False)
        q, k, v = (call[x].transpose(1, 2) for x in "qkv")
        if "dout" not in call:
            o, lse = plain_forward(q, k, v, call["softmax_scale"])
            wanted = name == "_flash_attn_forward" or call.get("return_lse")
            return (o.transpose(1, 2), lse if wanted else None, None, None)
        lse = call["softmax_lse" if name == "_flash_attn_backward" else "lse"]
        o, do = (call[x].transpose(1, 2) for x in ("out", "dout"))
        grads = plain_backward(q, k, v, o, lse, do, call["softmax_scale"])
        for x, grad in zip(("dq", "dk", "dv"), grads):
            call[x].copy_(grad.transpose(1, 2))

    function.__signature__ = signature
    if "ward" not in name:
        return function
    # flash-attn-3's are custom operations, which hide the function that they were made from
    return type("CustomOpDef", (), {"_init_fn": staticmethod(function), "__call__": staticmethod(function)})()


def install_packages(monkeypatch) -> list[str]:
    """Both packages are installed; returns the names of the functions that are called."""
    called = []
    for package in libraries.PACKAGES.values():
        parts = package.module.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        for name in (package.forward, package.backward):
            setattr(sys.modules[package.module], name, package_function(name, called))
    return called


class FakeAten:
    """PyTorch's GPU operations on CPU tensors: schemas checked on meta tensors, the conventions kept."""

    def __init__(self, lse_axes: int):
        self.lse_axes, self.called = lse_axes, []

    def __getattr__(self, name):
        real = getattr(torch.ops.aten, name).default

        def operation(*args, **kwargs):
            names = [a.name for a in real._schema.arguments]
            assert len(args) <= sum(not a.kwarg_only for a in real._schema.arguments)
            call = dict(zip(names, args)) | kwargs
            real(*(a.to("meta") if isinstance(a, torch.Tensor) else a for a in args), **kwargs)
            self.called.append(name)
            assert not call["dropout_p"] and not call["is_causal"] and call.get("attn_bias") is None
            q, k, v = (call[x] for x in ("query", "key", "value"))
            if not name.endswith("backward"):
                assert call.get("compute_log_sumexp", True)
                o, lse = plain_forward(q, k, v, call["scale"])
                return (o, self.theirs(name, lse), *[None] * 7)
            lse, do = call["logsumexp"], call.get("grad_out", call.get("grad_out_"))
            expected = self.theirs(name, lse.flatten(2)[:, :, : q.shape[2]])
            assert torch.equal(lse, expected) and lse.shape == expected.shape
            assert call.get("max_q", q.shape[2]) == call.get("max_k", k.shape[2]) == q.shape[2]
            assert call.get("cum_seq_q") is None and call.get("grad_input_mask", [True] * 3)[:3] == [True] * 3
            grads = plain_backward(q, k, v, call["out"], lse.flatten(2)[:, :, : q.shape[2]], do, call["scale"])
            return (*(g.to(q.dtype) for g in grads), None)[: len(real._schema.returns)]

        return operation

    def theirs(self, name, lse):
        """lse as the operation has it: padded to multiples of 32 with infinities, or with one more axis."""
        if "efficient" in name:
            return F.pad(lse, (0, -lse.shape[-1] % 32), value=float("inf"))
        return lse[..., None] if "cudnn" in name and self.lse_axes == 4 else lse
