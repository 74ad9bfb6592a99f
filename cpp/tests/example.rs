#[path = "../rust/onnxtrain.rs"]
#[allow(dead_code)]
mod onnxtrain;

use onnxtrain::{Data, Trainer};

fn main() -> Result<(), String> {
    let x = [0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0]; // four rows of two numbers
    let labels = [0, 1, 1, 0];
    let mut trainer = Trainer::open("artifacts", 1)?;
    let mut loss = 0.0;
    for _ in 0..500 {
        loss = trainer.step(&[("x", Data::F32(&x)), ("labels", Data::I64(&labels))])?.loss;
    }
    println!("loss {loss:.9}");
    trainer.save("checkpoint.safetensors")?;
    trainer.export("trained.onnx")
}
