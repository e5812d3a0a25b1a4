"""The compiler and its runtime: ONNX graphs in, native code out. `import lathe` is the public interface."""
