"""Facts about operators for the generator: exact results, shared memory, results computed from extents."""

from __future__ import annotations


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Any two correct programs compute the same bits.
EXACT = words(
    """
    Identity Reshape Flatten Squeeze Unsqueeze Transpose Slice Split Gather GatherElements GatherND Concat Expand
    Tile Pad DepthToSpace SpaceToDepth Compress ReverseSequence Scatter ScatterElements ScatterND TensorScatter
    Trilu Where Neg Abs Relu Max Min Clip Floor Ceil Round Sign Not And Or Xor Equal Less Greater LessOrEqual
    GreaterOrEqual IsNaN IsInf ArgMax ArgMin TopK NonZero Unique OneHot EyeLike Range ConstantOfShape Shape Size
    ReduceMax ReduceMin MaxPool GlobalMaxPool Dropout Hardmax CenterCropPad SequenceConstruct SequenceAt
    ConcatFromSequence SplitToSequence SequenceInsert SequenceErase SequenceLength ThresholdedRelu BitCast MaxUnpool
    """
)

# One operation per number, rounded once.
ONE_ROUNDING = words("Add Sub Mul Div Sqrt Reciprocal Cast CastLike")

# Products may be computed from others with larger numbers.
MANY_ROUNDINGS = words("Conv ConvTranspose LSTM GRU RNN InstanceNormalization MeanVarianceNormalization")

VIEWS = words("Identity Reshape Flatten Squeeze Unsqueeze Dropout Transpose")
WINDOWS = words("Slice Split Gather CenterCropPad")

# If any input (JOINS) or the first one (CARRIES) is computed from an extent, so is the result.
JOINS = words(
    """
    Add Sub Mul Div Mod Pow Max Min Sum Mean And Or Xor Equal Less Greater LessOrEqual GreaterOrEqual Where PRelu
    BitShift BitwiseAnd BitwiseOr BitwiseXor Concat Range
    """
)
CARRIES = words(
    """
    Cast CastLike Neg Abs Sqrt Floor Ceil Round Sign Not Identity Reshape Squeeze Unsqueeze Gather Slice Clip Expand
    Tile ReduceSum ReduceProd ReduceMax ReduceMin Tanh Sigmoid Relu Reciprocal BitwiseNot Split
    """
)


# The rank of the results is known even if that of the input is not.
FIXES_RANK = words(
    """
    Reshape Flatten Shape Size ConstantOfShape NonZero Range EyeLike Unique Conv MaxPool AveragePool
    """
)

# ONNX Runtime computes them in float32 precision, whatever the element type is.
ROUGH = words("Erf Gelu HardSwish Shrink")
