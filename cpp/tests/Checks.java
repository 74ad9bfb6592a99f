import java.util.Map;
import onnxtrain.Trainer;

/** What the Java class promises besides steps. */
public final class Checks {
    public static void main(String[] arguments) {
        float[] x = {0, 0, 0, 1, 1, 0, 1, 1};
        long[] labels = {0, 1, 1, 0};
        Map<String, Object> batch = Map.of("x", x, "labels", labels);
        refused("manifest.json: not there", () -> new Trainer("nowhere", 1));
        Trainer trainer = new Trainer("artifacts", 1);
        refused("missing from the batch: 'labels'", () -> trainer.step(Map.of("x", x)));
        refused("'labels' is int64[batch], got int32", () -> trainer.step(Map.of("x", x, "labels", new int[4])));
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
        refused("no such parameter: 'nothing'", () -> trainer.parameter("nothing"));
        trainer.close();
        refused("this trainer was closed", () -> trainer.step(batch));
        System.out.println("all as promised");
    }

    private static void check(boolean holds) {
        if (!holds) throw new AssertionError();
    }

    private static void refused(String start, Runnable work) {
        try {
            work.run();
        } catch (IllegalStateException error) {
            if (error.getMessage().startsWith(start)) return;
            throw error;
        }
        throw new AssertionError("not refused: " + start);
    }
}
