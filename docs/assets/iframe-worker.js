// A page opened as a file may not start a Worker. The search needs one: here it is a hidden frame
// that runs the same script. Only for file://; a server's pages keep the browser's own.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.waiting = []
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.appendChild(frame)
      const inner = frame.contentWindow
      inner.postMessage = data => this.hear(data)
      const script = frame.contentDocument.createElement("script")
      script.src = url
      script.onload = () => {
        this.inner = inner
        this.waiting.splice(0).forEach(data => this.postMessage(data))
      }
      frame.contentDocument.body.appendChild(script)
    }
    hear(data) {
      const event = new MessageEvent("message", { data })
      this.dispatchEvent(event)
      if (this.onmessage) this.onmessage(event)
    }
    postMessage(data) {
      if (this.inner) this.inner.dispatchEvent(new MessageEvent("message", { data }))
      else this.waiting.push(data)
    }
    terminate() {}
  }
}
