"""Operators that ONNX Runtime's CPU provider runs and Lathe refuses, with reasons; see core/ops/COVERAGE.md."""

from __future__ import annotations

MICROSOFT, BLOCKED = "com.microsoft", "com.microsoft.nchwc"

_SEARCH = "a loop over a decoder inside the model that moves state between beams; generate step by step instead"
_LAYOUT = "a layout that ONNX Runtime's optimizer makes for one machine, and writes to no file that is to be shared"
_PACKED = "its tables are packed in formats of ONNX Runtime's own"
_ENGRAM = "of experimental models alone (Engram, hyper-connections)"

# (domain, operator) -> why it is refused.
OPERATORS = {
    ("", "MemcpyFromHost"): "a copy between devices that ONNX Runtime inserts, and writes to no file",
    ("", "MemcpyToHost"): "a copy between devices that ONNX Runtime inserts, and writes to no file",
    (MICROSOFT, "AttnLSTM"): "an LSTM with attention from before transformers; ONNX's LSTM and products express it",
    (MICROSOFT, "BeamSearch"): _SEARCH,
    (MICROSOFT, "BifurcationDetector"): "a step of aggressive decoding outside the model's network",
    (MICROSOFT, "CropAndResize"): "few TensorFlow models have it; RoiAlign and GridSample compute much the same",
    (MICROSOFT, "DecoderMaskedMultiHeadAttention"): "a step inside BeamSearch and GreedySearch, which are refused",
    (MICROSOFT, "DynamicTimeWarping"): "the alignment of words to audio after Whisper's decoder, for timestamps",
    (MICROSOFT, "EngramGate"): _ENGRAM,
    (MICROSOFT, "GatedDeltaNet"): "sequences of many lengths in one batch; LinearAttention does it for one length",
    (MICROSOFT, "GatherPacked"): _PACKED,
    (MICROSOFT, "GreedySearch"): _SEARCH,
    (MICROSOFT, "HyperConnectionPostMix"): _ENGRAM,
    (MICROSOFT, "HyperConnectionPreMix"): _ENGRAM,
    (MICROSOFT, "MatMulFpQ4"): "its weights are packed for one machine; MatMulNBits has taken its place",
    (MICROSOFT, "MaxpoolWithMask"): "its schema says that it is for internal use",
    (MICROSOFT, "NGramHashMapping"): _ENGRAM,
    (MICROSOFT, "NGramRepeatBlock"): "a step of a search for texts outside the model's network",
    (MICROSOFT, "Sampling"): _SEARCH,
    (MICROSOFT, "SparseAttention"): "blocks of a mask in compressed rows (Phi-3-small alone)",
    (MICROSOFT, "SparseToDenseMatMul"): "sparse tensors, which Lathe has none of",
    (MICROSOFT, "VarlenCausalConvWithState"): "sequences of many lengths in one batch; CausalConvWithState is for one",
    (MICROSOFT, "VarlenNGramHashMapping"): _ENGRAM,
    (MICROSOFT, "WhisperBeamSearch"): _SEARCH,
    (MICROSOFT, "WordConvEmbedding"): "embeddings of letters; Gather, Conv and ReduceMax express it",
    **{
        (BLOCKED, op): _LAYOUT
        for op in (
            "AveragePool", "Conv", "GlobalAveragePool", "GlobalMaxPool", "MaxPool", "ReorderInput", "ReorderOutput",
            "Upsample",
        )
    },
}  # fmt: skip

# (operator, attribute) -> why its lowering does not read the attribute.
ATTRIBUTES = {
    ("Attention", "rotary_embedding_dim"): "it counts with do_rotary only, which is refused",
    ("DynamicQuantizeLSTM", "activation_alpha"): "the activations that it may have take no numbers",
    ("DynamicQuantizeLSTM", "activation_beta"): "the activations that it may have take no numbers",
    ("DynamicQuantizeLSTM", "hidden_size"): "the weights have this extent",
    ("EmbedLayerNormalization", "mask_index_type"): "it declares the second output, which is as it is",
    ("FusedGemm", "activation_gamma"): "no activation that it may have takes a third number",
    ("GroupQueryAttention", "k_quant_type"): "it counts with a scale of keys only, which is refused",
    ("GroupQueryAttention", "v_quant_type"): "it counts with a scale of values only, which is refused",
    ("MatMulBnb4", "training_mode"): "the product is the same",
    ("QMoE", "accuracy_level"): "it lets an engine compute with fewer bits; the products are of floats",
    ("QMoE", "block_size"): "the shape of the scales says it",
    ("RotaryEmbedding", "scale"): "ONNX Runtime's CPU kernel does not read it either",
    ("SimplifiedLayerNormalization", "stash_type"): "sums are of float32 whatever it says",
}
