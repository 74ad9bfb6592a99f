import java.util.Map;
import onnxtrain.Trainer;

/** Checks of the Java class besides training. */
public final class Checks {
    public static void main(String[] arguments) {
        float[] x = {0, 0, 0, 1, 1, 0, 1, 1};
        long[] labels = {0, 1, 1, 0};
        Map<String, Object> batch = Map.of("x", x, "labels", labels);
        rejects("manifest.json: not found", () -> new Trainer("nowhere", 1));
        Trainer trainer = new Trainer("artifacts", 1);
        rejects("missing from the batch: 'labels'", () -> trainer.step(Map.of("x", x)));
        rejects("'labels' is int64[batch], got int32", () -> trainer.step(Map.of("x", x, "labels", new int[4])));
        double before = trainer.evaluate(batch).loss();
        trainer.setLearningRate(0.02);
        for (int i = 0; i < 300; i++) trainer.step(batch);
        check(trainer.learningRate() == 0.02 && trainer.globalStep() == 300);
        trainer.save("java.safetensors");
        double after = trainer.evaluate(batch).loss();
        check(after < before && trainer.metric("accuracy") == 1.0);
        float[] weights = trainer.parameter("fc2.bias");
        trainer.step(batch);
        trainer.load("java.safetensors");
        check(trainer.evaluate(batch).loss() == after);
        check(java.util.Arrays.equals(weights, trainer.parameter("fc2.bias")));
        rejects("unknown parameter: 'nothing'", () -> trainer.parameter("nothing"));
        trainer.close();
        rejects("this trainer was closed", () -> trainer.step(batch));
        System.out.println("all checks passed");
    }

    private static void check(boolean holds) {
        if (!holds) throw new AssertionError();
    }

    private static void rejects(String start, Runnable work) {
        try {
            work.run();
        } catch (IllegalStateException error) {
            if (error.getMessage().startsWith(start)) return;
            throw error;
        }
        throw new AssertionError("not rejected: " + start);
    }
}
