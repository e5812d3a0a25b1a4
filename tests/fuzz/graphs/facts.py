"""Facts about operators for the generator: exact results, shared memory, results that carry extents."""

from __future__ import annotations


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Values that any two correct programs compute to the same bits.
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

# Where products may be computed from other ones, whose numbers are larger.
MANY_ROUNDINGS = words("Conv ConvTranspose LSTM GRU RNN InstanceNormalization MeanVarianceNormalization")

VIEWS = words("Identity Reshape Flatten Squeeze Unsqueeze Dropout Transpose")
WINDOWS = words("Slice Split Gather CenterCropPad")

# Their results hold an extent that any of the inputs holds, or that the first one does.
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


# Their results have a rank of their own, whatever that of the input is.
FIXES_RANK = words(
    """
    Reshape Flatten Shape Size ConstantOfShape NonZero Range EyeLike Unique Conv MaxPool AveragePool
    """
)

# ONNX Runtime computes them in float32 precision, whatever the element type is.
ROUGH = words("Erf Gelu HardSwish Shrink")
