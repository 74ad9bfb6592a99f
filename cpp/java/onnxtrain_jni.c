/* JNI binding of the C interface: converts strings and buffers, and errors to exceptions. */
#include <jni.h>
#include <onnxtrain.h>
#include <stdlib.h>

#define NATIVE(type, name) JNIEXPORT type JNICALL Java_onnxtrain_Trainer_##name

static onnxtrain_trainer* trainer_of(jlong handle) {
  return (onnxtrain_trainer*)(intptr_t)handle;
}

static void fail(JNIEnv* env, const char* message) {
  jclass kind = (*env)->FindClass(env, "java/lang/IllegalStateException");
  if (kind) (*env)->ThrowNew(env, kind, message);
}

/* Throw the last error if the call failed. */
static void check(JNIEnv* env, int failed) {
  if (failed) fail(env, onnxtrain_error());
}

/* Call a trainer function with a string argument. */
static void with_text(JNIEnv* env, jlong handle, jstring text, int (*call)(onnxtrain_trainer*, const char*)) {
  const char* chars = (*env)->GetStringUTFChars(env, text, NULL);
  if (!chars) return;
  check(env, call(trainer_of(handle), chars));
  (*env)->ReleaseStringUTFChars(env, text, chars);
}

NATIVE(jlong, open)(JNIEnv* env, jclass self, jstring directory, jint threads) {
  (void)self;
  onnxtrain_trainer* trainer = NULL;
  const char* path = (*env)->GetStringUTFChars(env, directory, NULL);
  if (!path) return 0;
  check(env, onnxtrain_open(path, threads, -1, &trainer));
  (*env)->ReleaseStringUTFChars(env, directory, path);
  return (jlong)(intptr_t)trainer;
}

NATIVE(void, close)(JNIEnv* env, jclass self, jlong handle) {
  (void)env, (void)self;
  onnxtrain_close(trainer_of(handle));
}

NATIVE(jdoubleArray, run)
(JNIEnv* env, jclass self, jlong handle, jobjectArray names, jobjectArray types, jobjectArray data, jboolean evaluate) {
  (void)self;
  const jsize count = (*env)->GetArrayLength(env, names);
  onnxtrain_tensor* batch = calloc((size_t)count + 1, sizeof *batch);
  jstring* texts = calloc(2 * (size_t)count + 1, sizeof *texts);
  onnxtrain_result result = {0};
  int failed = !batch || !texts;
  for (jsize i = 0; i < count && !failed; ++i) {
    jobject buffer = (*env)->GetObjectArrayElement(env, data, i);
    texts[2 * i] = (*env)->GetObjectArrayElement(env, names, i);
    texts[2 * i + 1] = (*env)->GetObjectArrayElement(env, types, i);
    batch[i].name = (*env)->GetStringUTFChars(env, texts[2 * i], NULL);
    batch[i].dtype = (*env)->GetStringUTFChars(env, texts[2 * i + 1], NULL);
    batch[i].data = (*env)->GetDirectBufferAddress(env, buffer);
    batch[i].size = (size_t)(*env)->GetDirectBufferCapacity(env, buffer);
    batch[i].rank = -1;
  }
  if (failed) fail(env, "out of memory");
  else if (evaluate) check(env, failed = onnxtrain_eval(trainer_of(handle), batch, (size_t)count, &result));
  else check(env, failed = onnxtrain_step(trainer_of(handle), batch, (size_t)count, &result));
  for (jsize i = 0; batch && texts && i < count; ++i) {
    if (batch[i].name) (*env)->ReleaseStringUTFChars(env, texts[2 * i], batch[i].name);
    if (batch[i].dtype) (*env)->ReleaseStringUTFChars(env, texts[2 * i + 1], batch[i].dtype);
  }
  free(batch);
  free(texts);
  if (failed) return NULL;
  const jdouble values[] = {result.loss, (jdouble)result.step, result.updated};
  jdoubleArray out = (*env)->NewDoubleArray(env, 3);
  if (out) (*env)->SetDoubleArrayRegion(env, out, 0, 3, values);
  return out;
}

NATIVE(jdouble, metric)(JNIEnv* env, jclass self, jlong handle, jstring name) {
  (void)self;
  double value = 0;
  const char* chars = (*env)->GetStringUTFChars(env, name, NULL);
  if (!chars) return 0;
  check(env, onnxtrain_metric(trainer_of(handle), chars, &value));
  (*env)->ReleaseStringUTFChars(env, name, chars);
  return value;
}

NATIVE(jlong, globalStep)(JNIEnv* env, jclass self, jlong handle) {
  (void)env, (void)self;
  return onnxtrain_global_step(trainer_of(handle));
}

NATIVE(jdouble, learningRate)(JNIEnv* env, jclass self, jlong handle) {
  (void)env, (void)self;
  return onnxtrain_get_lr(trainer_of(handle));
}

NATIVE(void, setLearningRate)(JNIEnv* env, jclass self, jlong handle, jdouble lr) {
  (void)self;
  check(env, onnxtrain_set_lr(trainer_of(handle), lr));
}

NATIVE(jbyteArray, parameter)(JNIEnv* env, jclass self, jlong handle, jstring name) {
  (void)self;
  jbyteArray out = NULL;
  size_t size = 0;
  const char* chars = (*env)->GetStringUTFChars(env, name, NULL);
  if (!chars) return NULL;
  int failed = onnxtrain_parameter_size(trainer_of(handle), chars, &size);
  void* data = failed ? NULL : malloc(size + 1);
  failed = failed || (data && onnxtrain_get_parameter(trainer_of(handle), chars, data, size));
  check(env, failed);
  if (!failed && data) {
    out = (*env)->NewByteArray(env, (jsize)size);
    if (out) (*env)->SetByteArrayRegion(env, out, 0, (jsize)size, data);
  }
  free(data);
  (*env)->ReleaseStringUTFChars(env, name, chars);
  return out;
}

NATIVE(void, save)(JNIEnv* env, jclass self, jlong handle, jstring path) {
  (void)self;
  with_text(env, handle, path, onnxtrain_save);
}

NATIVE(void, load)(JNIEnv* env, jclass self, jlong handle, jstring path) {
  (void)self;
  with_text(env, handle, path, onnxtrain_load);
}

NATIVE(void, export)(JNIEnv* env, jclass self, jlong handle, jstring path) {
  (void)self;
  with_text(env, handle, path, onnxtrain_export);
}
