// One stream of server-sent events shared by all tabs of this browser, because browsers limit connections per server. The
// tab that holds a lock (the leader) has the stream and broadcasts its events. A hidden tab releases the lock.

const LOCK = "tunesmith-watch";
const RETRY_MS = 2000;
const MAX_RETRY_MS = 30000;
export const EVENTS = ["metrics", "state", "versions", "votes", "reset"];

export class Feed {
  /**
   * `cursor()` is the resume position, `receive(event, data)` gets each event, `connected(isOpen)` the connection state;
   * `refused()` is called if the server denies the stream. `listen` receives broadcasts of other tabs; `start`, once the
   * page knows its cursor, makes this tab a candidate for the leader; `stop` ends both.
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
    // Without the Web Locks API (plain HTTP from another machine) each tab has a stream of its own.
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

  /** Hold the lock and the stream until `stop`. */
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
      // The browser reconnects by itself unless the server refused.
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

  /** Deliver to this tab and all others; the latest state is kept for new tabs. */
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
