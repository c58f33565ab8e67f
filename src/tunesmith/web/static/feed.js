// One stream of server-sent events for all tabs of this browser. Browsers allow few connections to one server, so the tab
// that holds a lock keeps the stream and tells the others. A tab that is hidden lets go of it.

const LOCK = "tunesmith-watch";
const RETRY_MS = 2000;
const MAX_RETRY_MS = 30000;
export const EVENTS = ["metrics", "state", "versions", "votes", "reset"];

export class Feed {
  /**
   * `cursor()` is where to go on, `receive(event, data)` gets each event, `connected(isOpen)` tells of the line, and
   * `refused()` that the server does not let this browser in. `listen` takes what other tabs tell; `start`, once the page
   * knows its cursor, lets this tab keep the stream when no other one does; `stop` ends both.
   */
  constructor(url, { cursor, receive, connected, refused }) {
    this.url = url;
    this.cursor = cursor;
    this.receive = receive;
    this.connected = connected;
    this.refused = refused;
    this.latest = new Map();
    this.channel = new BroadcastChannel(LOCK + url);
    this.channel.onmessage = ({ data }) => this.hear(data);
    this.isOn = false;
    this.waiting = null;
    this.release = null;
    this.source = null;
    this.retryMs = RETRY_MS;
  }

  listen() {
    if (this.isOn) return;
    this.isOn = true;
    this.channel.postMessage({ kind: "hello" });
  }

  start() {
    if (!this.isOn || this.waiting || this.source) return;
    // Without locks, as on plain HTTP from another machine, each tab has a stream of its own.
    if (!navigator.locks) {
      this.open();
      return;
    }
    const waiting = new AbortController();
    this.waiting = waiting;
    navigator.locks
      .request(LOCK + this.url, { signal: waiting.signal }, () => (waiting === this.waiting ? this.lead() : undefined))
      .catch((error) => {
        if (error.name !== "AbortError") throw error;
      });
  }

  stop() {
    this.isOn = false;
    this.waiting?.abort();
    this.waiting = null;
    this.close();
    this.release?.();
    this.release = null;
  }

  /** Keeps the lock, and the stream, until `stop`. */
  lead() {
    this.open();
    return new Promise((resolve) => {
      this.release = resolve;
    });
  }

  open() {
    this.source = new EventSource(`${this.url}?after=${this.cursor()}`);
    this.source.onopen = () => {
      this.retryMs = RETRY_MS;
      this.tell({ kind: "line", isOpen: true });
    };
    this.source.onerror = () => {
      this.tell({ kind: "line", isOpen: false });
      // The browser tries again by itself unless the server refused.
      if (this.source?.readyState !== EventSource.CLOSED) return;
      this.close();
      this.refused();
      setTimeout(() => {
        if (this.isOn && !this.source && (this.release || !navigator.locks)) this.open();
      }, this.retryMs);
      this.retryMs = Math.min(2 * this.retryMs, MAX_RETRY_MS);
    };
    for (const event of EVENTS) {
      this.source.addEventListener(event, ({ data }) => this.tell({ kind: "event", event, data: JSON.parse(data) }));
    }
  }

  close() {
    this.source?.close();
    this.source = null;
  }

  /** For this tab and all others; what a new tab wants to know at once is kept. */
  tell(message) {
    if (message.kind === "line") this.latest.set("line", message);
    if (["state", "versions", "votes"].includes(message.event)) this.latest.set(message.event, message);
    if (navigator.locks) this.channel.postMessage(message);
    this.take(message);
  }

  hear(message) {
    if (message.kind !== "hello") {
      if (this.isOn && !this.source) this.take(message);
      return;
    }
    if (this.source && navigator.locks) for (const kept of this.latest.values()) this.channel.postMessage(kept);
  }

  take(message) {
    if (message.kind === "line") this.connected(message.isOpen);
    else this.receive(message.event, message.data);
  }
}
