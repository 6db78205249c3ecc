// Browsers start no Worker for a page that was opened as a file, and the search runs in one.
// There, this puts the worker's script into a hidden frame instead and passes the messages on.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.waiting = []
      const frame = document.createElement("iframe")
      frame.hidden = true
      frame.srcdoc = "<!doctype html><title>search</title>"
      frame.onload = () => this.start(frame.contentWindow, url)
      document.documentElement.appendChild(frame)
    }

    start(inner, url) {
      const load = address => new Promise((resolve, reject) => {
        const script = inner.document.createElement("script")
        Object.assign(script, { src: address, onload: resolve, onerror: reject })
        inner.document.head.appendChild(script)
      })
      inner.postMessage = data => {
        const event = new MessageEvent("message", { data })
        this.dispatchEvent(event)
        if (this.onmessage) this.onmessage(event)
      }
      inner.importScripts = (...addresses) =>
        addresses.reduce((done, address) => done.then(() => load(address)), Promise.resolve())
      load(url).then(() => {
        this.deliver = data => inner.dispatchEvent(new MessageEvent("message", { data }))
        this.waiting.forEach(data => this.deliver(data))
      })
    }

    postMessage(data) {
      this.deliver ? this.deliver(data) : this.waiting.push(data)
    }

    terminate() {}
  }
