/** The camera of the person, where there is one and they allow it. */

/** Shows the camera in a video; gives what turns it off. */
export async function openCamera(video: HTMLVideoElement, facing: "user" | "environment" = "user"): Promise<() => void> {
  if (!navigator.mediaDevices?.getUserMedia) throw new Error("this browser gives no camera to this page; a page needs https for that");
  const stream = await allowed({ video: { facingMode: facing, width: { ideal: 640 } } }, "camera");
  video.srcObject = stream;
  video.muted = true;
  video.playsInline = true;
  await video.play();
  return () => {
    stream.getTracks().forEach((t) => t.stop());
    video.srcObject = null;
  };
}

/** Asks for a device; what the person refuses is said in words. */
export async function allowed(wanted: MediaStreamConstraints, name: string): Promise<MediaStream> {
  try {
    return await navigator.mediaDevices.getUserMedia(wanted);
  } catch (error) {
    const { name: kind, message } = error as DOMException;
    if (kind === "NotAllowedError") throw new Error(`the ${name} is not allowed here: allow it in the browser's bar, or take pictures from files`);
    if (kind === "NotFoundError") throw new Error(`there is no ${name} on this device; pictures from files work too`);
    throw new Error(`the ${name} cannot be used: ${message}`);
  }
}
