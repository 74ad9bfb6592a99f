"""Temporary stand-in; replaced by the hardened loader."""
import onnx, onnx_ir as ir
def load(source, *, allow_domains=()):
    if isinstance(source, ir.Model): return source.clone()
    if isinstance(source, onnx.ModelProto): return ir.from_proto(source)
    if isinstance(source, bytes): return ir.from_proto(onnx.load_from_string(source))
    return ir.load(source)
