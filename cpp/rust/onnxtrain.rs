//! Train onnxtrain artifacts from Rust, with the C API; no dependencies.

use std::ffi::{CStr, CString};
use std::os::raw::{c_char, c_double, c_int, c_void};

#[repr(C)]
struct RawTensor {
    name: *const c_char,
    dtype: *const c_char,
    data: *const c_void,
    size: usize,
    shape: *const i64,
    rank: c_int,
}

/// Result of a step or an evaluation; `updated` is 0 if the loss is not finite.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Report {
    pub loss: c_double,
    pub step: i64,
    pub updated: c_int,
}

#[link(name = "onnxtrain_c")]
extern "C" {
    fn onnxtrain_error() -> *const c_char;
    fn onnxtrain_open(directory: *const c_char, threads: c_int, seed: i64, out: *mut *mut c_void) -> c_int;
    fn onnxtrain_close(trainer: *mut c_void);
    fn onnxtrain_step(trainer: *mut c_void, batch: *const RawTensor, count: usize, out: *mut Report) -> c_int;
    fn onnxtrain_eval(trainer: *mut c_void, batch: *const RawTensor, count: usize, out: *mut Report) -> c_int;
    fn onnxtrain_global_step(trainer: *const c_void) -> i64;
    fn onnxtrain_set_lr(trainer: *mut c_void, lr: c_double) -> c_int;
    fn onnxtrain_save(trainer: *mut c_void, path: *const c_char) -> c_int;
    fn onnxtrain_load(trainer: *mut c_void, path: *const c_char) -> c_int;
    fn onnxtrain_export(trainer: *mut c_void, path: *const c_char) -> c_int;
}

/// The elements of a tensor of a batch; the shape follows from the model.
pub enum Data<'a> {
    F32(&'a [f32]),
    F64(&'a [f64]),
    I64(&'a [i64]),
    I32(&'a [i32]),
}

impl Data<'_> {
    fn parts(&self) -> (&'static CStr, *const c_void, usize) {
        fn of<T>(name: &'static [u8], elements: &[T]) -> (&'static CStr, *const c_void, usize) {
            let name = CStr::from_bytes_with_nul(name).unwrap();
            (name, elements.as_ptr().cast(), std::mem::size_of_val(elements))
        }
        match self {
            Data::F32(e) => of(b"float32\0", e),
            Data::F64(e) => of(b"float64\0", e),
            Data::I64(e) => of(b"int64\0", e),
            Data::I32(e) => of(b"int32\0", e),
        }
    }
}

/// Trains the model of an artifact directory.
pub struct Trainer(*mut c_void);

impl Trainer {
    pub fn open(directory: &str, threads: i32) -> Result<Trainer, String> {
        let mut trainer = std::ptr::null_mut();
        let path = text(directory)?;
        check(unsafe { onnxtrain_open(path.as_ptr(), threads, -1, &mut trainer) })?;
        Ok(Trainer(trainer))
    }

    /// Train on one batch: elements by input name.
    pub fn step(&mut self, batch: &[(&str, Data)]) -> Result<Report, String> {
        self.run(batch, onnxtrain_step)
    }

    /// Return loss and metrics of one batch in evaluation mode.
    pub fn evaluate(&mut self, batch: &[(&str, Data)]) -> Result<Report, String> {
        self.run(batch, onnxtrain_eval)
    }

    pub fn global_step(&self) -> i64 {
        unsafe { onnxtrain_global_step(self.0) }
    }

    pub fn set_lr(&mut self, lr: f64) -> Result<(), String> {
        check(unsafe { onnxtrain_set_lr(self.0, lr) })
    }

    /// Save a checkpoint atomically.
    pub fn save(&mut self, path: &str) -> Result<(), String> {
        let path = text(path)?;
        check(unsafe { onnxtrain_save(self.0, path.as_ptr()) })
    }

    /// Resume from a checkpoint; nothing changes if it does not match the artifacts.
    pub fn load(&mut self, path: &str) -> Result<(), String> {
        let path = text(path)?;
        check(unsafe { onnxtrain_load(self.0, path.as_ptr()) })
    }

    /// Export the inference model with the current weights.
    pub fn export(&mut self, path: &str) -> Result<(), String> {
        let path = text(path)?;
        check(unsafe { onnxtrain_export(self.0, path.as_ptr()) })
    }

    fn run(
        &mut self,
        batch: &[(&str, Data)],
        call: unsafe extern "C" fn(*mut c_void, *const RawTensor, usize, *mut Report) -> c_int,
    ) -> Result<Report, String> {
        let names = batch.iter().map(|(name, _)| text(name)).collect::<Result<Vec<_>, _>>()?;
        let tensors: Vec<RawTensor> = batch
            .iter()
            .zip(&names)
            .map(|((_, data), name)| {
                let (dtype, data, size) = data.parts();
                RawTensor { name: name.as_ptr(), dtype: dtype.as_ptr(), data, size, shape: std::ptr::null(), rank: -1 }
            })
            .collect();
        let mut report = Report::default();
        check(unsafe { call(self.0, tensors.as_ptr(), tensors.len(), &mut report) })?;
        Ok(report)
    }
}

impl Drop for Trainer {
    fn drop(&mut self) {
        unsafe { onnxtrain_close(self.0) }
    }
}

fn text(value: &str) -> Result<CString, String> {
    CString::new(value).map_err(|_| format!("NUL character in {value:?}"))
}

fn check(failed: c_int) -> Result<(), String> {
    if failed == 0 {
        return Ok(());
    }
    Err(unsafe { CStr::from_ptr(onnxtrain_error()) }.to_string_lossy().into_owned())
}
