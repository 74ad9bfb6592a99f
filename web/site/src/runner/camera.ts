/** Access to camera and microphone. */

/** Shows the camera in a video element; returns a function that turns it off. */
export async function openCamera(video: HTMLVideoElement, facing: "user" | "environment" = "user"): Promise<() => void> {
  if (!navigator.mediaDevices?.getUserMedia) throw new Error("the camera is not available: it needs a secure context (https)");
  const stream = await requestMedia({ video: { facingMode: facing, width: { ideal: 640 } } }, "camera");
  video.srcObject = stream;
  video.muted = true;
  video.playsInline = true;
  await video.play();
  return () => {
    stream.getTracks().forEach((t) => t.stop());
    video.srcObject = null;
  };
}

/** Requests a device; throws a readable error if it is denied or missing. */
export async function requestMedia(constraints: MediaStreamConstraints, name: string): Promise<MediaStream> {
  try {
    return await navigator.mediaDevices.getUserMedia(constraints);
  } catch (error) {
    const { name: kind, message } = error as DOMException;
    if (kind === "NotAllowedError") throw new Error(`the ${name} is blocked: allow it in the address bar, or use image files`);
    if (kind === "NotFoundError") throw new Error(`no ${name} found on this device; use image files instead`);
    throw new Error(`the ${name} cannot be used: ${message}`);
  }
}
