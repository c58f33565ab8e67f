-- runs.db as the first release made it.
CREATE TABLE alembic_version (
    version_num VARCHAR(32) NOT NULL,
    CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
CREATE TABLE policy_versions (
    version INTEGER NOT NULL,
    created_at DOUBLE NOT NULL,
    parent INTEGER,
    path TEXT NOT NULL,
    heldout_accuracy DOUBLE,
    win_rate DOUBLE,
    win_rate_low DOUBLE,
    win_rate_high DOUBLE,
    num_votes INTEGER NOT NULL,
    kl DOUBLE,
    accepted BOOLEAN NOT NULL,
    serving BOOLEAN NOT NULL,
    note TEXT NOT NULL,
    CONSTRAINT pk_policy_versions PRIMARY KEY (version)
);
CREATE TABLE offers (
    id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    version INTEGER NOT NULL,
    heldout BOOLEAN NOT NULL,
    prompt_json TEXT NOT NULL,
    retires_before INTEGER NOT NULL,
    created_at DOUBLE NOT NULL
);
CREATE TABLE offer_candidates (
    offer_id INTEGER NOT NULL,
    position INTEGER NOT NULL,
    text TEXT NOT NULL,
    token_ids_json TEXT,
    logps_json TEXT,
    source_id VARCHAR(200) NOT NULL,
    CONSTRAINT pk_offer_candidates PRIMARY KEY (offer_id, position),
    CONSTRAINT fk_offer_candidates_offer_id FOREIGN KEY(offer_id) REFERENCES offers (id)
);
CREATE TABLE metrics (
    id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    step INTEGER NOT NULL,
    time DOUBLE NOT NULL,
    name VARCHAR(200) NOT NULL,
    value DOUBLE
);
CREATE INDEX ix_metrics_name_id_value ON metrics (name, id, value);
CREATE TABLE jobs (
    id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    kind VARCHAR(64) NOT NULL,
    state VARCHAR(32) NOT NULL,
    created_at DOUBLE NOT NULL,
    ended_at DOUBLE,
    detail_json TEXT NOT NULL
);
CREATE TABLE heartbeat (
    id INTEGER NOT NULL,
    pid INTEGER NOT NULL,
    host VARCHAR(200) NOT NULL,
    time DOUBLE NOT NULL,
    state VARCHAR(64) NOT NULL,
    CONSTRAINT pk_heartbeat PRIMARY KEY (id)
);
INSERT INTO alembic_version VALUES ('runs_0001');
