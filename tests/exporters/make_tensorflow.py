"""Exports models of Keras with tf2onnx. Run it with an interpreter that has both, not with Lathe's.

python make_tensorflow.py FOLDER     FOLDER/<module>/{model.onnx, inputs.npz, outputs.npz}
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ.update(TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="-1", TF_ENABLE_ONEDNN_OPTS="0")

import numpy as np
import tensorflow as tf
import tf2onnx

keras = tf.keras
layers = keras.layers


def images() -> Any:
    """Channels last, as TensorFlow has them, with strided, depthwise and transposed convolutions and a skip."""
    x = keras.Input((16, 16, 3))
    y = layers.ReLU(6.0)(layers.BatchNormalization()(layers.Conv2D(8, 3, padding="same")(x)))
    y = layers.DepthwiseConv2D(3, strides=2, padding="same")(y)
    y = layers.Conv2D(16, 1, activation="swish")(layers.AveragePooling2D(2, strides=1, padding="same")(y))
    up = layers.Conv2DTranspose(4, 3, strides=2, padding="same")(y)
    joined = layers.Concatenate()([up, layers.UpSampling2D(2, interpolation="bilinear")(y), x])
    joined = layers.ZeroPadding2D(1)(joined)
    return keras.Model(x, layers.Dense(5, activation="softmax")(layers.GlobalAveragePooling2D()(joined)))


def sequences() -> Any:
    """Recurrent nets over steps."""
    x = keras.Input((6, 5))
    y = layers.Bidirectional(layers.LSTM(4, return_sequences=True))(x)
    y = layers.LayerNormalization()(layers.Conv1D(6, 3, padding="causal", activation="elu")(y))
    return keras.Model(x, layers.Dense(2)(layers.GRU(4)(y)))


def attention() -> Any:
    """Self-attention with a residual."""
    x = keras.Input((6, 8))
    y = layers.Add()([x, layers.MultiHeadAttention(2, 4)(x, x)])
    return keras.Model(x, layers.Dense(3)(layers.Flatten()(layers.LayerNormalization()(y))))


def main(folder: Path) -> None:
    keras.utils.set_random_seed(7)
    for build in (images, sequences, attention):
        model, target = build(), folder / build.__name__
        target.mkdir(parents=True)
        shape = model.input_shape[1:]
        signature = (tf.TensorSpec((None, *shape), tf.float32, name="x"),)
        function = tf.function(lambda x, model=model: model(x))
        tf2onnx.convert.from_function(function, signature, opset=17, output_path=str(target / "model.onnx"))
        given = np.random.default_rng(0).normal(size=(3, *shape)).astype("float32")
        np.savez(target / "inputs.npz", given)
        np.savez(target / "outputs.npz", model(given).numpy())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
