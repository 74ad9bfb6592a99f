//! Checks of the Rust module besides training.
#[path = "../rust/onnxtrain.rs"]
mod onnxtrain;

use onnxtrain::{Data, Trainer};

fn main() -> Result<(), String> {
    let (x, labels) = ([0.0f32, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0], [0i64, 1, 1, 0]);
    let batch = [("x", Data::F32(&x)), ("labels", Data::I64(&labels))];
    assert!(Trainer::open("nowhere", 1).err().unwrap().starts_with("manifest.json: not found"));
    let mut trainer = Trainer::open("artifacts", 1)?;
    let wrong = [("x", Data::F64(&[0.0; 8])), ("labels", Data::I32(&[0; 4]))];
    assert_eq!(trainer.step(&wrong).unwrap_err(), "'x' is float32[batch, 2], got float64");
    let before = trainer.evaluate(&batch)?.loss;
    trainer.set_lr(0.02)?;
    for number in 1..=300 {
        let report = trainer.step(&batch)?;
        assert_eq!((report.step, report.updated), (number, 1));
    }
    trainer.save("rust.safetensors")?;
    let after = trainer.evaluate(&batch)?.loss;
    assert!(after < before && trainer.global_step() == 300);
    trainer.step(&batch)?;
    trainer.load("rust.safetensors")?;
    assert_eq!(trainer.evaluate(&batch)?.loss, after);
    trainer.export("rust.onnx")?;
    println!("all checks passed");
    Ok(())
}
