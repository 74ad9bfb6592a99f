"""Small valid models to mutate."""

from __future__ import annotations

import onnx
import onnx.parser

_HEAD = '<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]> g'
_OLD = '<ir_version: 7, opset_import: ["": 12]> g'
_FLAT = "(float[n, 4] x) => (float[n, m] y)"

MODELS = {
    "mlp": f"""{_HEAD} {_FLAT} <float[4, 3] w = {{1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3}},
        float[3] b = {{0.1, 0.2, 0.3}}> {{
        h = Gemm<transB = 0, alpha = 0.5>(x, w, b)
        r = Relu(h)
        y = Softmax<axis = -1>(r) }}""",
    "conv": f"""{_HEAD} (float[n, 1, 6, 6] x) => (float[n, k] y)
        <float[1, 1, 3, 3] w = {{1, 2, 3, 4, 5, 6, 7, 8, 9}}> {{
        c = Conv<pads = [1, 1, 1, 1], strides = [2, 2]>(x, w)
        p = MaxPool<kernel_shape = [2, 2], ceil_mode = 1>(c)
        a = AveragePool<kernel_shape = [1, 1], auto_pad = "SAME_UPPER">(p)
        y = Flatten<axis = 1>(a) }}""",
    "shapes": f"""{_HEAD} {_FLAT} <int64[2] t = {{-1, 2}}, int64[2] s = {{0, 0}},
        int64[2] e = {{9, 2}}, int64[1] k = {{2}}, int64[4] q = {{0, 1, 0, 1}}> {{
        p = Pad(x, q)
        r = Reshape(x, t)
        l = Slice(p, s, e)
        v, i = TopK<axis = 1>(l, k)
        j = Concat<axis = 0>(v, r)
        y = Transpose<perm = [0, 1]>(j) }}""",
    "reduce": f"""{_HEAD} {_FLAT} <int64[1] a = {{1}}> {{
        s = ReduceSum<keepdims = 1>(x, a)
        m = ReduceMean<axes = [1], keepdims = 1>(x)
        d = Sub(s, m)
        y = Div(x, d) }}""",
    "if": f"""{_HEAD} (bool c, float[2] x) => (float[2] y) {{
        y = If(c) <then_branch = t () => (float[2] a) {{ a = Relu(x) }},
                   else_branch = e () => (float[2] b) {{ b = Neg(x) }}> }}""",
    "loop": f"""{_HEAD} (float[2] x) => (float[2] y, float[k, 2] z)
        <int64 n = {{3}}, bool c = {{1}}> {{
        y, z = Loop(n, c, x) <body = b (int64 i, bool p, float[2] u)
            => (bool q, float[2] v, float[2] w)
            {{ q = Identity(p) v = Mul(u, x) w = Neg(v) }}> }}""",
    "scan": f"""{_HEAD} (float[2] x, float[5, 2] s) => (float[2] y, float[5, 2] z) {{
        y, z = Scan(x, s) <num_scan_inputs = 1, body = b (float[2] u, float[2] q)
            => (float[2] v, float[2] w) {{ v = Add(u, q) w = Neg(v) }}> }}""",
    "lstm": f"""{_HEAD} (float[3, 2, 1] x) => (float[3, 1, 2, 1] y)
        <float[1, 4, 1] w = {{1, 2, 3, 4}}, float[1, 4, 1] r = {{0.1, 0.2, 0.3, 0.4}},
        float[1, 8] b = {{1, 2, 3, 4, 5, 6, 7, 8}}> {{
        y = LSTM<hidden_size = 1, direction = "forward">(x, w, r, b) }}""",
    "sequence": f"""{_HEAD} (float[4, 2] x) => (float[a, b] y) <int64 k = {{2}}> {{
        s = SplitToSequence<axis = 0>(x, k)
        y = ConcatFromSequence<axis = 1>(s) }}""",
    "fused": f"""{_HEAD} (float[2, 4] x) => (float[2, 4] y) <float[4] b = {{1, 2, 3, 4}}> {{
        g = com.microsoft.BiasGelu(x, b)
        k = com.microsoft.SkipLayerNormalization<epsilon = 1e-6>(g, x, b)
        y = com.microsoft.QuickGelu<alpha = 1.5>(k) }}""",
    "function": """<ir_version: 8, opset_import: ["": 17, "own": 1]> g
        (float[2, 4] x) => (float[a, b] y) { y = own.F<alpha = 0.5>(x) }
        <domain: "own", opset_import: ["": 17]> F<alpha>(x) => (y) {
            z = LeakyRelu<alpha: float = @alpha>(x)
            y = Neg(z) }""",
    "old": f"""{_OLD} (float[2, 3, 4] x) => (float[a, b] y) <float[4] w = {{1, 2, 3, 4}}> {{
        m = Mul(x, w)
        s = ReduceSum<axes = [1], keepdims = 0>(m)
        q = Unsqueeze<axes = [1]>(s)
        u = Squeeze<axes = [1]>(q)
        y = Softmax<axis = 1>(u) }}""",
}


def base_model(name: str) -> onnx.ModelProto:
    """Return a new copy of a model."""
    return onnx.parser.parse_model(MODELS[name])
