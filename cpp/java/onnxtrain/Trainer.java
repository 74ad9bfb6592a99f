package onnxtrain;

import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.util.Map;

/** Trains the model of an artifact directory. Not thread-safe. */
public final class Trainer implements AutoCloseable {
    /** Result of a step or an evaluation; {@code updated} is false if the loss is not finite. */
    public record Result(double loss, long step, boolean updated) {}

    static {
        System.loadLibrary("onnxtrain_jni");
    }

    private long handle;

    /** Opens an artifact directory; with 0 threads, onnxruntime selects the number. */
    public Trainer(String directory, int threads) {
        handle = open(directory, threads);
    }

    /** Trains on one batch: primitive arrays by input name; shapes follow from the model. */
    public Result step(Map<String, ?> batch) {
        return run(batch, false);
    }

    /** Returns loss and metrics of one batch in evaluation mode. */
    public Result evaluate(Map<String, ?> batch) {
        return run(batch, true);
    }

    public double metric(String name) {
        return metric(handle(), name);
    }

    public long globalStep() {
        return globalStep(handle());
    }

    public double learningRate() {
        return learningRate(handle());
    }

    public void setLearningRate(double lr) {
        setLearningRate(handle(), lr);
    }

    /** Returns a copy of a float32 parameter. */
    public float[] parameter(String name) {
        byte[] bytes = parameter(handle(), name);
        float[] values = new float[bytes.length / Float.BYTES];
        ByteBuffer.wrap(bytes).order(ByteOrder.nativeOrder()).asFloatBuffer().get(values);
        return values;
    }

    /** Saves a checkpoint atomically. */
    public void save(String path) {
        save(handle(), path);
    }

    /** Resumes from a checkpoint; nothing changes if it does not match the artifacts. */
    public void load(String path) {
        load(handle(), path);
    }

    /** Writes the inference model with the current weights. */
    public void export(String path) {
        export(handle(), path);
    }

    @Override
    public void close() {
        close(handle);
        handle = 0;
    }

    private long handle() {
        if (handle == 0) throw new IllegalStateException("this trainer was closed");
        return handle;
    }

    private Result run(Map<String, ?> batch, boolean evaluate) {
        String[] names = new String[batch.size()];
        String[] types = new String[batch.size()];
        ByteBuffer[] data = new ByteBuffer[batch.size()];
        int i = 0;
        for (Map.Entry<String, ?> entry : batch.entrySet()) {
            names[i] = entry.getKey();
            types[i] = typeOf(entry.getValue());
            data[i++] = buffer(entry.getValue());
        }
        double[] result = run(handle(), names, types, data, evaluate);
        return new Result(result[0], (long) result[1], result[2] != 0);
    }

    private static String typeOf(Object array) {
        if (array instanceof float[]) return "float32";
        if (array instanceof double[]) return "float64";
        if (array instanceof long[]) return "int64";
        if (array instanceof int[]) return "int32";
        if (array instanceof byte[]) return "uint8";
        throw new IllegalArgumentException("unsupported tensor type: " + array.getClass().getSimpleName());
    }

    private static ByteBuffer buffer(Object array) {
        if (array instanceof float[] a) {
            ByteBuffer b = direct(a.length * Float.BYTES);
            b.asFloatBuffer().put(a);
            return b;
        }
        if (array instanceof double[] a) {
            ByteBuffer b = direct(a.length * Double.BYTES);
            b.asDoubleBuffer().put(a);
            return b;
        }
        if (array instanceof long[] a) {
            ByteBuffer b = direct(a.length * Long.BYTES);
            b.asLongBuffer().put(a);
            return b;
        }
        if (array instanceof int[] a) {
            ByteBuffer b = direct(a.length * Integer.BYTES);
            b.asIntBuffer().put(a);
            return b;
        }
        byte[] a = (byte[]) array;
        ByteBuffer b = direct(a.length);
        b.duplicate().put(a);
        return b;
    }

    private static ByteBuffer direct(int bytes) {
        return ByteBuffer.allocateDirect(bytes).order(ByteOrder.nativeOrder());
    }

    private static native long open(String directory, int threads);

    private static native void close(long handle);

    private static native double[] run(
            long handle, String[] names, String[] types, ByteBuffer[] data, boolean evaluate);

    private static native double metric(long handle, String name);

    private static native long globalStep(long handle);

    private static native double learningRate(long handle);

    private static native void setLearningRate(long handle, double lr);

    private static native byte[] parameter(long handle, String name);

    private static native void save(long handle, String path);

    private static native void load(long handle, String path);

    private static native void export(long handle, String path);
}
