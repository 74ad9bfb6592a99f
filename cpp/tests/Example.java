import java.util.Map;
import onnxtrain.Trainer;

public final class Example {
    public static void main(String[] arguments) {
        float[] x = {0, 0, 0, 1, 1, 0, 1, 1}; // four rows of two numbers
        long[] labels = {0, 1, 1, 0};
        try (Trainer trainer = new Trainer("artifacts", 1)) {
            double loss = 0;
            for (int i = 0; i < 500; i++) loss = trainer.step(Map.of("x", x, "labels", labels)).loss();
            System.out.printf("loss %.9g%n", loss);
            trainer.save("checkpoint.safetensors");
            trainer.export("trained.onnx");
        }
    }
}
